#include "lockstep/models/generate.h"

#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::models {
namespace {

std::int64_t sampled(const at::Tensor& logits, const GenerateOptions& options,
                     at::Generator& generator) {
  const at::Tensor scores = logits.to(at::kCPU, at::kFloat) / options.temperature;
  auto [sorted, order] = scores.sort(/*dim=*/-1, /*descending=*/true);
  at::Tensor shares = sorted.softmax(-1);
  // A token is skipped when those before it have top_p together; the first one never is.
  const at::Tensor before = shares.cumsum(-1) - shares;
  if (options.top_p < 1) shares = shares * (before < std::max(options.top_p, 1e-12));
  return order[torch::multinomial(shares, 1, false, generator).item<std::int64_t>()]
      .item<std::int64_t>();
}

// How many tokens a text may have before its rotary frequencies change; 0: they never do.
std::int64_t last_short_length(const CausalLmConfig& config) {
  const LlamaConfig* llama = config.llama();
  return llama != nullptr && llama->rope.type == "longrope"
             ? llama->rope.original_max_position_embeddings
             : 0;
}

void check_generate(const CausalLm& model, const std::vector<std::int64_t>& ids,
                    const GenerateOptions& o) {
  const std::int64_t size = model.config().vocab_size();
  if (ids.empty())
    throw UsageError("generate", "there is no token to continue. Give one at least.");
  for (const std::int64_t id : ids)
    if (id < 0 || id >= size)
      throw UsageError("generate", "the token {} is outside of the vocabulary of {}.", id, size);
  if (o.max_new_tokens < 0 || !(o.temperature >= 0) || !(o.top_p > 0 && o.top_p <= 1))
    throw UsageError("generate",
                     "max_new_tokens {}, temperature {} and top_p {} must be at least 0, at least "
                     "0, and in (0, 1].",
                     o.max_new_tokens, o.temperature, o.top_p);
  const auto length = static_cast<std::int64_t>(ids.size());
  const std::int64_t most = model.config().max_positions();
  if (model.config().gpt() != nullptr && length + o.max_new_tokens > most + 1)
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
    // Longer texts have other rotary frequencies with longrope: what was cached is computed again.
    const std::int64_t limit = last_short_length(model.config());
    if (limit > 0 && cache.length() == limit) {
      cache = KvCache();
      next = row(all);
    }
    const at::Tensor hidden = model.hidden_states(next, &cache);
    const at::Tensor logits = model.logits(hidden.slice(1, -1)).flatten();
    made.push_back(options.temperature == 0 ? logits.argmax().item<std::int64_t>()
                                            : sampled(logits, options, generator));
    if (std::ranges::find(options.eos, made.back()) != options.eos.end()) break;
    all.push_back(made.back());
    next = row({made.back()});
  }
  return made;
}

}  // namespace lockstep::models
