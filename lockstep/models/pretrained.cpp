#include "lockstep/models/pretrained.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/io/tensors.h"
#include "lockstep/models/generate.h"

namespace lockstep::models {
namespace {

// The file's own memory where its place allows it; a copy otherwise.
at::Tensor mapped(const io::SafetensorsSet::Found& found) {
  const auto bytes = found.bytes();
  const at::ScalarType type = io::scalar_type_of(found.entry->dtype);
  if (bytes.empty() || reinterpret_cast<std::uintptr_t>(bytes.data()) % c10::elementSize(type) != 0)
    return io::tensor_of(found);
  // Only read from: the target of copy_() is another tensor.
  return torch::from_blob(const_cast<std::byte*>(bytes.data()), found.entry->shape, type);
}

const char* dtype_text(at::ScalarType type) {
  if (type == at::kBFloat16) return "bfloat16";
  if (type == at::kHalf) return "float16";
  return type == at::kDouble ? "float64" : "float32";
}

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

CausalLmPtr load_pretrained(const std::string& folder, const PretrainedOptions& options) {
  const CausalLmConfig config = read_config(folder);
  const io::SafetensorsSet files(folder);
  const std::vector<FoundWeight> weights = find_weights(folder, files, config);
  const CausalLmPtr model =
      make_causal_lm(config, {.dtype = options.dtype,
                              .device = options.device,
                              .draw = false,
                              .pad_vocab_to_multiple_of = options.pad_vocab_to_multiple_of});
  const torch::NoGradGuard no_grad;
  auto parameters = model->named_parameters();
  for (const FoundWeight& weight : weights) {
    at::Tensor& target = parameters[weight.name];
    target.narrow(0, 0, weight.file.entry->shape.at(0)).copy_(mapped(weight.file));
  }
  model->eval();
  return model;
}

void save_pretrained(const CausalLm& model, const std::string& folder, const SaveOptions& options) {
  const torch::NoGradGuard no_grad;
  const auto parameters = model.named_parameters();
  std::vector<at::Tensor> held;  // what is written is theirs
  std::vector<io::TensorBytes> tensors;
  std::uint64_t bytes = 0;
  at::ScalarType dtype = at::kFloat;
  for (const io::TensorShape& tensor : tensors_of(model.config())) {
    const at::Tensor& parameter = parameters[tensor.name];
    held.push_back(parameter.detach().narrow(0, 0, tensor.shape.at(0)).cpu().contiguous());
    tensors.push_back(io::bytes_of_tensor(tensor.name, held.back()));
    bytes += tensors.back().bytes.size();
    dtype = parameter.scalar_type();
  }
  io::AtomicDir dir(folder, {.expected_bytes = bytes, .replace = true});
  dir.write("config.json", config_json(model.config(), dtype_text(dtype)));
  io::write_safetensors_set(dir, std::move(tensors), {{"format", "pt"}},
                            {.max_shard_bytes = options.max_shard_bytes});
  dir.commit();
}

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
