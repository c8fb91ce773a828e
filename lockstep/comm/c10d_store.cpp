#include "lockstep/comm/c10d_store.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/rendezvous/store_client.h"

namespace lockstep::detail {
namespace {

using store::Command;

class LauncherStore : public c10d::Store {
 public:
  explicit LauncherStore(std::shared_ptr<StoreClient> client) : client_(std::move(client)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    auto copy = c10::make_intrusive<LauncherStore>(client_);
    copy->setTimeout(getTimeout());
    return copy;
  }

  void set(const std::string& key, const StoreBytes& value) override {
    post(StoreRequest(Command::kSet).key(key).value(value), "setting " + key);
  }
  void append(const std::string& key, const StoreBytes& value) override {
    post(StoreRequest(Command::kAppend).key(key).value(value), "appending to " + key);
  }
  void queuePush(const std::string& key, const StoreBytes& value) override {
    post(StoreRequest(Command::kQueuePush).key(key).value(value), "pushing to " + key);
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<StoreBytes>& values) override {
    if (keys.size() != values.size()) {
      throw UsageError("store", "multiSet was given {} keys and {} values.", keys.size(),
                       values.size());
    }
    StoreRequest request(Command::kMultiSet);
    request.number<std::uint64_t>(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) request.key(keys[i]).value(values[i]);
    post(request, "setting " + names(keys));
  }

  StoreBytes compareSet(const std::string& key, const StoreBytes& expected,
                        const StoreBytes& desired) override {
    return ask(StoreRequest(Command::kCompareSet).key(key).value(expected).value(desired),
               "comparing " + key, &StoreConnection::receive_value);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return ask_number(StoreRequest(Command::kAdd).key(key).number(amount), "adding to " + key);
  }
  bool deleteKey(const std::string& key) override {
    return ask_number(StoreRequest(Command::kDeleteKey).key(key), "deleting " + key) == 1;
  }
  std::int64_t getNumKeys() override {
    return ask_number(StoreRequest(Command::kNumKeys), "counting keys");
  }
  std::int64_t queueLen(const std::string& key) override {
    return ask_number(StoreRequest(Command::kQueueLen).key(key), "counting in " + key);
  }
  bool check(const std::vector<std::string>& keys) override {
    return ask(StoreRequest(Command::kCheck).keys(keys), "looking for " + names(keys),
               &StoreConnection::receive_number<char>) == store::kReady;
  }

  StoreBytes get(const std::string& key) override {
    wait({key});
    return ask(StoreRequest(Command::kGet).key(key), "reading " + key,
               &StoreConnection::receive_value);
  }
  std::vector<StoreBytes> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return ask(StoreRequest(Command::kMultiGet).keys(keys), "reading " + names(keys),
               [count = keys.size()](const StoreConnection& from, const StoreCall& call) {
                 std::vector<StoreBytes> values;
                 while (values.size() < count) values.push_back(from.receive_value(call));
                 return values;
               });
  }
  std::vector<std::string> listKeys() override {
    return ask(StoreRequest(Command::kListKeys), "listing keys",
               [](const StoreConnection& from, const StoreCall& call) {
                 std::vector<std::string> keys;
                 for (auto left = from.receive_number<std::int64_t>(call); left > 0; --left) {
                   const StoreBytes key = from.receive_value(call);
                   keys.emplace_back(key.begin(), key.end());
                 }
                 return keys;
               });
  }
  StoreBytes queuePop(const std::string& key, bool block) override {
    if (block) wait({key});
    const auto popped =
        ask(StoreRequest(Command::kQueuePop).key(key), "popping from " + key,
            [](const StoreConnection& from, const StoreCall& call) -> std::optional<StoreBytes> {
              if (from.receive_number<std::int64_t>(call) == 0) return std::nullopt;
              return from.receive_value(call);
            });
    TORCH_CHECK_WITH(DistQueueEmptyError, popped.has_value(), "queue is empty");
    return *popped;
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const char reply = client_->exchange(StoreRequest(Command::kWait).keys(keys),
                                         call_for("waiting for " + names(keys), timeout),
                                         &StoreConnection::receive_number<char>);
    LOCKSTEP_ASSERT(reply == store::kStopWaiting);
  }

  bool hasExtendedApi() const override { return true; }

 private:
  static std::string names(const std::vector<std::string>& keys) {
    constexpr std::size_t kShown = 8;
    std::string text;
    for (std::size_t i = 0; i < std::min(keys.size(), kShown); ++i)
      text += (i == 0 ? "" : ", ") + keys[i];
    if (keys.size() > kShown) text += fmt::format(" and {} more", keys.size() - kShown);
    return text;
  }

  static StoreCall call_for(const std::string& what, std::chrono::milliseconds timeout) {
    return {what,
            Deadline::after(timeout == c10d::Store::kNoTimeout ? std::chrono::milliseconds::max()
                                                               : timeout)};
  }

  template <typename Read, typename T = std::invoke_result_t<const Read&, const StoreConnection&,
                                                             const StoreCall&>>
  T ask(const StoreRequest& request, const std::string& what, const Read& read) {
    return client_->exchange(request, call_for(what, getTimeout()), read);
  }
  std::int64_t ask_number(const StoreRequest& request, const std::string& what) {
    return ask(request, what, &StoreConnection::receive_number<std::int64_t>);
  }
  void post(const StoreRequest& request, const std::string& what) {
    client_->change(request, call_for(what, getTimeout()));
  }

  const std::shared_ptr<StoreClient> client_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> open_launcher_store(int channel_fd) {
  auto store = c10::make_intrusive<LauncherStore>(std::make_shared<StoreClient>(channel_fd));
  store->getNumKeys();  // fails here when the launcher is gone
  return store;
}

}  // namespace lockstep::detail
