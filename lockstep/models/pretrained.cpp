#include "lockstep/models/pretrained.h"

#include <torch/torch.h>

#include <map>

#include "lockstep/core/error.h"
#include "lockstep/io/tensors.h"
#include "lockstep/models/linear.h"
#include "lockstep/nn/divided.h"
#include "lockstep/nn/nf4.h"

namespace lockstep::models {
namespace {

const char* dtype_text(at::ScalarType type) {
  if (type == at::kBFloat16) return "bfloat16";
  if (type == at::kHalf) return "float16";
  return type == at::kDouble ? "float64" : "float32";
}

}  // namespace

CausalLmPtr make_causal_lm(const CausalLmConfig& config, const ParameterOptions& options) {
  auto model = std::make_shared<CausalLm>(config, options);
  // Blocks are already on their devices: moved when made, or divided over ranks.
  for (at::Tensor& parameter : model->parameters())
    if (nn::rows_of(parameter) == nullptr)
      parameter.set_data(
          parameter.detach().to(options.device, nn::is_nf4(parameter) ? at::kByte : options.dtype));
  return model;
}

CausalLmPtr load_pretrained(const std::string& folder, const PretrainedOptions& options) {
  const CausalLmConfig config = read_config(folder);
  const io::SafetensorsSet files(folder);
  const std::vector<FoundWeight> weights = find_weights(folder, files, config);
  const CausalLmPtr model = make_causal_lm(
      config,
      {.dtype = options.dtype, .device = options.device, .draw = false, .nf4 = options.nf4});
  const torch::NoGradGuard no_grad;
  auto parameters = model->named_parameters();
  std::map<std::string, LinearImpl*> in_4_bits;  // by the name of the weight
  for (const auto& item : model->named_modules())
    if (auto* linear = item.value()->as<LinearImpl>(); linear != nullptr && linear->options.nf4())
      in_4_bits[item.key() + ".weight"] = linear;
  for (const FoundWeight& weight : weights) {
    const at::Tensor values = io::mapped_tensor(*weight.file.file, *weight.file.entry);
    if (const auto found = in_4_bits.find(weight.name); found != in_4_bits.end())
      found->second->assign_nf4(values);
    else
      nn::assign(parameters[weight.name], values);
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
    if (nn::is_nf4(parameter))
      throw UsageError("models",
                       "'{}' is stored in 4 bits, and is not saved as a model. Save its adapter.",
                       tensor.name);
    nn::check_whole(tensor.name, parameter);
    held.push_back(parameter.detach().cpu().contiguous());
    tensors.push_back(io::bytes_of_tensor(tensor.name, held.back()));
    bytes += tensors.back().bytes.size();
    dtype = parameter.scalar_type();
  }
  io::AtomicDir dir(folder, {.expected_bytes = bytes, .replace = true});
  dir.write("config.json", config_json(model.config(), dtype_text(dtype)));
  for (const auto& [name, text] : options.texts) dir.write(name, text);
  io::write_safetensors_set(dir, tensors, {{"format", "pt"}},
                            {.max_shard_bytes = options.max_shard_bytes});
  dir.commit();
}

}  // namespace lockstep::models
