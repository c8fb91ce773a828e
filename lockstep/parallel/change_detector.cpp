#include "lockstep/parallel/change_detector.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

// How a parameter's elements follow each other, where not row by row: its gradient lies in the
// bucket in the same order.
std::string show_strides(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense()) return "";
  std::vector<std::string> strides;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)  // one element has no next one
    strides.push_back(tensor.size(i) == 1 ? "-" : std::to_string(tensor.stride(i)));
  return fmt::format(", strides [{}]", fmt::join(strides, ", "));
}

}  // namespace

void ChangeDetector::accept() {
  forms_.clear();
  for (const auto& p : model_.parameters()) forms_.push_back(p.form());
  stale_ = false;
}

// As forms() != accepted ones, but without an allocation: it runs in every pass.
bool ChangeDetector::changed() const {
  for (std::size_t i = 0; i < forms_.size(); ++i) {
    const at::Tensor& t = model_[i].tensor;
    const ParameterForm& form = forms_[i];
    if (t.requires_grad() != form.requires_grad || t.scalar_type() != form.dtype ||
        t.device() != form.device || t.sizes() != form.sizes)
      return true;
  }
  return false;
}

// Ranks with different models would mix up gradients or hang; say which parameter differs.
void ChangeDetector::check_same_model(std::exception_ptr refusal) const {
  std::string lines;
  if (!refusal) refusal = refusal_of([&] { lines = describe(); });
  const Check check{.component = "reducer", .what = "to wrap the model", .refusal = refusal};
  const auto other = find_other_line(world_, check, lines);
  if (!other) return;
  // Parameters come before buffers and options: a line of a later kind is what follows after the
  // last parameter (or buffer) of a rank that lacks the other's.
  const auto kind = [](const std::string& line) {
    if (line.empty()) return 3;
    return line.starts_with("option ") ? 2 : line.find(": buffer, ") != std::string::npos ? 1 : 0;
  };
  const int earlier = std::min(kind(other->first), kind(other->here));
  const auto show = [&](const std::string& line) -> std::string {
    if (kind(line) == earlier) return line;
    return earlier == 1 ? "(no such buffer)" : "(no such parameter)";
  };
  throw UsageError("reducer",
                   "the models differ between ranks: rank 0 has '{}', rank {} has '{}'. Build the "
                   "same model with the same options on every rank.",
                   show(other->first), other->rank, show(other->here));
}

// A line for everything that decides which collectives follow, and what lies where in them.
std::string ChangeDetector::describe() const {
  std::string text;
  for (std::size_t i = 0; i < model_.size(); ++i) {
    const ModelParameter& p = model_[i];
    const ParameterForm form = p.form();
    text += fmt::format("{}: shape [{}], {} on {}, requires_grad={}{}{}\n", p.name,
                        fmt::join(form.sizes, ", "), c10::toString(form.dtype),
                        c10::DeviceTypeName(form.device.type(), /*lower_case=*/true),
                        form.requires_grad, show_strides(p.tensor), p.sparse ? ", sparse" : "");
  }
  text += model_.describe_buffers();
  const auto option = [&](const char* name, const auto& value) {
    text += fmt::format("option {}: {}\n", name, value);
  };
  const auto shown = [](const auto& optional) {
    return optional ? fmt::format("{}", *optional) : "unset";
  };
  option("bucket_cap_mb", shown(options_.bucket_cap_mb));
  option("find_unused_parameters", options_.find_unused_parameters);
  option("static_graph", options_.static_graph);
  option("broadcast_buffers", options_.broadcast_buffers);
  option("init_sync", options_.init_sync);
  option("overlap", shown(options_.overlap));
  return text;
}

std::string ChangeDetector::change_of(std::size_t parameter) const {
  const ParameterForm now = model_[parameter].form();
  const ParameterForm& then = forms_[parameter];
  if (now.requires_grad != then.requires_grad) return now.requires_grad ? "unfrozen" : "frozen";
  if (now.dtype != then.dtype) return fmt::format("moved to {}", c10::toString(now.dtype));
  if (now.device != then.device) return "moved to " + now.device.str();
  if (now.sizes == then.sizes) return "";
  return fmt::format("given the shape [{}]", fmt::join(now.sizes, ", "));
}

void ChangeDetector::check_unchanged(const char* since) const {
  for (std::size_t i = 0; i < forms_.size(); ++i) {
    const std::string change = change_of(i);
    if (change.empty()) continue;
    throw UsageError("ShardedOptimizer",
                     "parameter '{}' was {} after {}. Change the model first, then wrap it and "
                     "make the optimizer again.",
                     model_[i].name, change, since);
  }
}

void ChangeDetector::refuse() const {
  constexpr std::size_t kShown = 4;
  std::vector<std::string> changes;
  for (std::size_t i = 0; i < forms_.size(); ++i)
    if (const std::string change = change_of(i); !change.empty())
      changes.push_back(fmt::format("parameter '{}' was {}", model_[i].name, change));
  const std::size_t more = changes.size() > kShown ? changes.size() - kShown : 0;
  changes.resize(changes.size() - more);
  std::string mine = fmt::format("{}", fmt::join(changes, ", "));
  if (more > 0) mine += fmt::format(" and {} more were changed", more);
  // The ranks with the same changes together.
  std::map<std::string, std::vector<int>> ranks;
  const std::vector<std::string> all = all_gather_bytes(world_, mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) ranks[all[rank]].push_back(static_cast<int>(rank));
  std::vector<std::string> lines;
  for (const auto& [change, which] : ranks)
    lines.push_back(fmt::format("on {} {}", show_ranks(which), change));
  throw UsageError("reducer",
                   "the model was changed after it was wrapped: {}. What ranks exchange is laid "
                   "out for the model as it was. Make the change on every rank, and wrap the model "
                   "again.",
                   fmt::join(lines, "; "));
}

void ChangeDetector::send_flag(at::Tensor carrier) {
  flag_ = std::move(carrier);
  flag_work_ = Work();
  if (flag_.defined()) {
    flag_.fill_(stale_ ? 1 : 0);
    return;
  }
  flag_ = at::full({1}, stale_ ? 1 : 0, at::kLong);
  flag_work_ = world_.all_reduce(flag_);
}

const at::Tensor& ChangeDetector::flag() {
  flag_work_.wait();
  return flag_;
}

}  // namespace lockstep::parallel
