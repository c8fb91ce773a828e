// What the launchers of several hosts send each other: lines of JSON.
//
// Whatever comes from another host is checked here before anything acts on it: numbers have their
// range, codes and signals cannot turn a failure into exit code 0, and text is printable, since
// much of it ends on a terminal.
//
//   connection.send(encode(message));
//   Message message = decode(line);   // throws UsageError
//
// Plain values and free functions; nothing is owned.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launcher/report.h"
#include "lockstep/rendezvous/world_layout.h"

namespace lockstep::launch {

struct Message {
  enum class Kind {
    kHandshake,  // node -> 0: who I am
    kRefused,    // 0 -> node: text says why
    kSay,        // 0 -> nodes: text to print while waiting
    kStart,      // 0 -> nodes: begin `attempt` as one of `nodes`
    kFailed,     // node -> 0 -> nodes: `failure` ends this attempt
    kStop,       // node -> 0 -> nodes: `node` was asked to stop by `signal`, `request` times now
    kDown,       // node -> 0: nothing of this attempt is left here (`failure`: the first one here)
    kRestart,    // 0 -> nodes: print `failure`; a next attempt follows (text)
    kEnd,        // 0 -> nodes: the run is over; exit with `code`, print `failure`
    kForeign,    // never sent: from a launcher of another version; text says so
  };
  Kind kind = Kind::kSay;
  int node = 0;
  int attempt = 0;
  int signal = 0;
  int request = 1;  // kStop only: the first, the second, ... of its node
  int code = 0;
  std::string text = {};
  std::optional<RankFailure> failure = {};
  std::vector<NodeShare> nodes = {};  // kStart only: by node rank
  // The token of the run; kHandshake: empty for a launcher that has not been in one.
  std::string run = {};
  // kHandshake only. `attempt`: the lowest that it may take part in, since it has seen earlier
  // ones.
  std::string run_id = {};
  std::string host = {};
  int nnodes = 0;
  NodeShare share = {};
  std::map<std::string, std::string> flags = {};  // those that must be the same everywhere
};

std::string encode(const Message& message);  // one line with its newline
Message decode(const std::string& line);     // throws UsageError

std::string failure_to_json(const RankFailure& failure);
RankFailure failure_from_json(const std::string& text);  // throws UsageError when it is not one

}  // namespace lockstep::launch
