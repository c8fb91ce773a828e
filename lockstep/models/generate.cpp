#include "lockstep/models/generate.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "lockstep/core/error.h"

namespace lockstep::models {
namespace {

at::Tensor penalized(const at::Tensor& logits, const std::vector<std::int64_t>& text,
                     double penalty) {
  const at::Tensor seen = torch::tensor(text, at::kLong);
  const at::Tensor theirs = logits.gather(0, seen);
  return logits.scatter(0, seen, torch::where(theirs < 0, theirs * penalty, theirs / penalty));
}

std::int64_t sampled(const at::Tensor& logits, const GenerateOptions& options,
                     at::Generator& generator) {
  auto [sorted, order] = (logits / options.temperature).sort(/*dim=*/-1, /*descending=*/true);
  // Tokens as likely as the last one of top_k stay.
  if (options.top_k > 0 && options.top_k < sorted.size(0))
    sorted = sorted.masked_fill(sorted < sorted[options.top_k - 1], -INFINITY);
  at::Tensor shares = sorted.softmax(-1);
  // A token is skipped when those before it have top_p together; the first one never is.
  const at::Tensor before = shares.cumsum(-1) - shares;
  if (options.top_p < 1) shares = shares * (before < std::max(options.top_p, 1e-12));
  return order[torch::multinomial(shares, 1, false, generator).item<std::int64_t>()]
      .item<std::int64_t>();
}

// The token after `text`; `logits` are of its last one.
std::int64_t chosen(const at::Tensor& logits, const std::vector<std::int64_t>& text,
                    const GenerateOptions& options, at::Generator& generator) {
  at::Tensor scores = logits.to(at::kCPU, at::kFloat);
  if (options.repetition_penalty != 1) scores = penalized(scores, text, options.repetition_penalty);
  return options.temperature == 0 ? scores.argmax().item<std::int64_t>()
                                  : sampled(scores, options, generator);
}

void check_generate(const CausalLm& model, const std::vector<std::int64_t>& ids,
                    const GenerateOptions& o) {
  const std::int64_t size = model.config().vocab_size();
  if (ids.empty())
    throw UsageError("generate", "there is no token to continue. Give one at least.");
  for (const std::int64_t id : ids)
    if (id < 0 || id >= size)
      throw UsageError("generate", "the token {} is outside of the vocabulary of {}.", id, size);
  if (o.max_new_tokens < 0 || !(o.temperature >= 0) || o.top_k < 0 ||
      !(o.top_p > 0 && o.top_p <= 1) || !(o.repetition_penalty > 0))
    throw UsageError("generate",
                     "max_new_tokens {}, temperature {} and top_k {} must be at least 0, top_p {} "
                     "in (0, 1], and repetition_penalty {} above 0.",
                     o.max_new_tokens, o.temperature, o.top_k, o.top_p, o.repetition_penalty);
  const auto length = static_cast<std::int64_t>(ids.size());
  const std::int64_t most = model.config().max_positions();
  if (model.config().spec().positions_end() && length + o.max_new_tokens > most + 1)
    throw UsageError("generate",
                     "{} tokens and {} new ones are more than the model's n_positions {}. Lower "
                     "max_new_tokens, or shorten the text.",
                     length, o.max_new_tokens, most);
}

}  // namespace

std::vector<std::int64_t> generate(CausalLm& model, const std::vector<std::int64_t>& ids,
                                   const GenerateOptions& options) {
  check_generate(model, ids, options);
  struct Mode {
    explicit Mode(CausalLm& m) : model(m), training(m.is_training()) { model.eval(); }
    ~Mode() { model.train(training); }
    CausalLm& model;
    bool training;
  } const mode(model);
  const torch::NoGradGuard no_grad;
  const auto device = model.parameters().front().device();
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const auto row = [&](const std::vector<std::int64_t>& tokens) {
    return torch::tensor(tokens, at::kLong).unsqueeze(0).to(device);
  };
  KvCache cache;
  std::vector<std::int64_t> all = ids;
  at::Tensor next = row(all);
  std::vector<std::int64_t> made;
  for (std::int64_t i = 0; i < options.max_new_tokens; ++i) {
    const std::int64_t limit = model.config().spec().cache_limit;
    if (limit > 0 && cache.length() == limit) {
      cache = KvCache();
      next = row(all);
    }
    const at::Tensor hidden = model.hidden_states(next, &cache);
    const at::Tensor logits = model.logits(hidden.slice(1, -1)).flatten();
    made.push_back(chosen(logits, all, options, generator));
    if (std::ranges::find(options.eos, made.back()) != options.eos.end()) break;
    if (options.stop && options.stop(made)) break;
    all.push_back(made.back());
    next = row({made.back()});
  }
  return made;
}

}  // namespace lockstep::models
