#include "lockstep/train/trainer_state.h"

#include <fmt/format.h>

#include <cmath>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"

namespace lockstep::train {
namespace {

// log_history of a long run is the only thing here that grows.
constexpr DocumentLimits kLimits{.bytes = 256u << 20, .depth = 32, .nodes = 50'000'000};

Node number(double value) {
  return std::isfinite(value) ? real_node(value) : Node{};
}

template <typename T, typename Make>
Node maybe(const std::optional<T>& value, const Make& make) {
  return value ? make(*value) : Node{};
}

Node node_of(const LogEntry& entry) {
  NodeMembers members{{"step", integer_node(entry.step)}};
  if (!std::isnan(entry.epoch)) members.emplace_back("epoch", number(entry.epoch));
  for (const auto& [name, value] : entry.values) members.emplace_back(name, number(value));
  return map_node(std::move(members));
}

const Node* given(const Node& map, std::string_view key) {
  const Entry* entry = map.find(key);
  return entry == nullptr || entry->value.is(NodeKind::kNull) ? nullptr : &entry->value;
}

std::int64_t integer(const Node& map, std::string_view key, std::int64_t fallback) {
  const Node* node = given(map, key);
  return node == nullptr ? fallback : as_integer(*node, key);
}

double real(const Node& map, std::string_view key, double fallback) {
  const Node* node = given(map, key);
  return node == nullptr ? fallback : as_real(*node, key);
}

LogEntry entry_of(const Node& map) {
  LogEntry entry{.step = integer(map, "step", 0), .epoch = real(map, "epoch", 0)};
  for (const Entry& member : as_map(map, "log_history").entries) {
    if (member.key == "step" || member.key == "epoch") continue;
    const Node& value = member.value;
    if (value.is(NodeKind::kInteger) || value.is(NodeKind::kReal)) {
      entry.values.emplace_back(member.key, value.real);
    } else if (value.is(NodeKind::kNull)) {
      entry.values.emplace_back(member.key, std::nan(""));
    }
  }
  return entry;
}

constexpr const char* kStopping = "EarlyStoppingCallback";
constexpr const char* kCounter = "early_stopping_patience_counter";

Node callbacks_of(const TrainerState& state) {
  const Node attributes = map_node({{kCounter, integer_node(state.patience_used)}});
  return map_node({{kStopping, map_node({{"attributes", attributes}})}});
}

std::int64_t patience_of(const Node& root) {
  const Node* node = given(root, "stateful_callbacks");
  for (const char* key : {kStopping, "attributes"}) {
    if (node == nullptr || !node->is(NodeKind::kMap)) return 0;
    node = given(*node, key);
  }
  return node == nullptr || !node->is(NodeKind::kMap) ? 0 : integer(*node, kCounter, 0);
}

}  // namespace

const double* find_metric(const Metrics& metrics, std::string_view name) {
  for (const auto& [key, value] : metrics)
    if (key == name) return &value;
  return nullptr;
}

std::string log_entry_json(const LogEntry& entry, const std::string& run_name) {
  Node node = node_of(entry);
  if (!run_name.empty()) node.entries.push_back({"run_name", {}, text_node(run_name)});
  return to_json(node);
}

LogEntry parse_log_entry(std::string_view text, const std::string& name) {
  const Node root = parse_json(text, name);
  if (!root.is(NodeKind::kMap) || given(root, "step") == nullptr)
    throw UsageError("trainer", "{}: a line without a step.", name);
  return entry_of(root);
}

std::string trainer_state_text(const TrainerState& state) {
  std::vector<Node> history;
  for (const LogEntry& entry : state.log_history) history.push_back(node_of(entry));
  return to_json(map_node(
             {{"best_global_step", maybe(state.best_global_step, integer_node)},
              {"best_metric", maybe(state.best_metric, number)},
              {"best_model_checkpoint", maybe(state.best_model_checkpoint,
                                              [](const std::string& s) { return text_node(s); })},
              {"epoch", real_node(state.epoch)},
              {"eval_steps", real_node(state.eval_steps)},
              {"global_step", integer_node(state.global_step)},
              {"is_hyper_param_search", bool_node(false)},
              {"is_local_process_zero", bool_node(true)},
              {"is_world_process_zero", bool_node(true)},
              {"log_history", list_node(std::move(history))},
              {"logging_steps", real_node(state.logging_steps)},
              {"max_steps", integer_node(state.max_steps)},
              {"num_input_tokens_seen", integer_node(state.num_input_tokens_seen)},
              {"num_train_epochs", integer_node(state.num_train_epochs)},
              {"save_steps", real_node(state.save_steps)},
              {"stateful_callbacks", callbacks_of(state)},
              {"total_flos", real_node(0)},
              {"train_batch_size", integer_node(state.train_batch_size)},
              {"trial_name", Node{}},
              {"trial_params", Node{}}})) +
         "\n";
}

TrainerState parse_trainer_state(std::string_view text, const std::string& name) {
  const Node root = parse_json(text, name, kLimits);
  as_map(root, "trainer_state");
  TrainerState state;
  if (given(root, "global_step") == nullptr)
    throw UsageError("checkpoint", "{}: there is no global_step. It is not a trainer state.", name);
  state.global_step = integer(root, "global_step", 0);
  state.epoch = real(root, "epoch", 0);
  state.max_steps = integer(root, "max_steps", 0);
  state.num_train_epochs = integer(root, "num_train_epochs", 0);
  state.num_input_tokens_seen = integer(root, "num_input_tokens_seen", 0);
  state.train_batch_size = integer(root, "train_batch_size", 0);
  state.logging_steps = real(root, "logging_steps", 0);
  state.eval_steps = real(root, "eval_steps", 0);
  state.save_steps = real(root, "save_steps", 0);
  if (given(root, "best_metric") != nullptr) state.best_metric = real(root, "best_metric", 0);
  if (given(root, "best_global_step") != nullptr)
    state.best_global_step = integer(root, "best_global_step", 0);
  if (const Node* best = given(root, "best_model_checkpoint"))
    state.best_model_checkpoint = as_string(*best, "best_model_checkpoint");
  state.patience_used = patience_of(root);
  if (const Node* history = given(root, "log_history"))
    for (const Node& item : history->items) state.log_history.push_back(entry_of(item));
  return state;
}

std::string data_position_text(const DataPosition& position) {
  return to_json(map_node({{"epoch", integer_node(position.epoch)},
                           {"cursor", integer_node(position.cursor)},
                           {"seed", integer_node(position.seed)},
                           {"world_size", integer_node(position.world_size)},
                           {"batch_size", integer_node(position.batch_size)},
                           {"accumulation", integer_node(position.accumulation)},
                           {"dataset_size", integer_node(position.dataset_size)},
                           {"order_fingerprint", integer_node(position.order)},
                           {"epoch_ended", integer_node(position.epoch_ended)},
                           {"evaluation_due", integer_node(position.evaluation_due)},
                           {"threads", integer_node(position.threads)}})) +
         "\n";
}

DataPosition parse_data_position(std::string_view text, const std::string& name) {
  const Node root = parse_json(text, name);
  as_map(root, "sampler");
  DataPosition position;
  const std::pair<const char*, std::int64_t*> members[] = {{"epoch", &position.epoch},
                                                           {"cursor", &position.cursor},
                                                           {"seed", &position.seed},
                                                           {"world_size", &position.world_size},
                                                           {"batch_size", &position.batch_size},
                                                           {"accumulation", &position.accumulation},
                                                           {"dataset_size", &position.dataset_size},
                                                           {"epoch_ended", &position.epoch_ended}};
  for (const auto& [key, member] : members) {
    if (given(root, key) == nullptr)
      throw UsageError("checkpoint", "{}: there is no {}. It is not a sampler state.", name, key);
    *member = integer(root, key, 0);
  }
  position.order = integer(root, "order_fingerprint", 0);
  position.evaluation_due = integer(root, "evaluation_due", 0);
  position.threads = integer(root, "threads", 0);
  return position;
}

}  // namespace lockstep::train
