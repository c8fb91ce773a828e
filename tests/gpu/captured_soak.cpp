// A training program for gpu_soak_test.py: a GPT with dropout and a schedule, evaluations,
// checkpoints, and moving averages of the weights that are swapped in between the steps.
//
//   captured_soak FOLDER STEPS bf16|fp16 auto|false    the last is compile_model; it resumes
//
// FOLDER/averages.txt has a line for every evaluation of the averages: the step, and the loss in
// hexadecimal digits. FOLDER/averages-STEP.safetensors are the averages at the end.
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/io/file.h"
#include "lockstep/io/tensors.h"
#include "lockstep/lockstep.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/optim/ema.h"

namespace {

using namespace lockstep;

constexpr std::int64_t kVocabulary = 97, kLength = 256, kSamples = 4096;
constexpr std::int64_t kSaveSteps = 200, kEvalSteps = 150, kAverageSteps = 35;

// Each token follows from the one before it, with a few mistakes: the loss falls for a long time.
data::DatasetPtr sequences(std::int64_t count, std::uint64_t seed) {
  return optim::with_seed(seed, [&] {
    at::Tensor ids = torch::randint(kVocabulary, {count, kLength + 1}, at::kLong);
    const at::Tensor wrong = torch::rand({count, kLength + 1}) < 0.1;
    for (std::int64_t i = 1; i <= kLength; ++i) {
      const at::Tensor next = (ids.select(1, i - 1) * 31 + 7) % kVocabulary;
      ids.select(1, i).copy_(at::where(wrong.select(1, i), ids.select(1, i), next));
    }
    return std::make_shared<data::TensorDataset>(ids.slice(1, 0, kLength).contiguous(),
                                                 ids.slice(1, 1).contiguous());
  });
}

class Averages : public Observer {
 public:
  Averages(models::Gpt net, std::string folder)
      : net_(std::move(net)), folder_(std::move(folder)) {}

  void on_train_begin(Event& event) override {
    ema_.emplace(*net_, optim::EmaOptions{.decay = 0.99});
    const std::int64_t step = event.state.global_step;
    if (step == 0) return;
    const io::SafetensorsFile file(path(step));
    std::map<std::string, at::Tensor> state;
    for (const auto& entry : file.tensors()) state[entry.name] = io::tensor_of(file, entry);
    ema_->load_state_dict(state);
  }

  void on_step_end(Event& event) override {
    ema_->update();
    if (event.state.global_step % kAverageSteps != 0) return;
    const auto averaged = ema_->swap();
    const torch::NoGradGuard no_grad;
    net_->eval();
    const at::Tensor ids = torch::arange(4 * kLength).view({4, kLength}) % kVocabulary;
    const at::Tensor on_device = ids.to(net_->parameters().front().device());
    const double loss = net_->loss(on_device, on_device.roll(-1, 1)).item<double>();
    net_->train();
    std::FILE* lines = std::fopen((folder_ + "/averages.txt").c_str(), "a");
    std::fprintf(lines, "%lld %a\n", static_cast<long long>(event.state.global_step), loss);
    std::fclose(lines);
  }

  void on_save(Event& event) override { write(event.state.global_step); }
  void on_train_end(Event& event) override { write(event.state.global_step); }

 private:
  std::string path(std::int64_t step) const {
    return folder_ + "/averages-" + std::to_string(step) + ".safetensors";
  }
  void write(std::int64_t step) {
    std::map<std::string, at::Tensor> state = ema_->state_dict();
    std::vector<io::TensorBytes> bytes;
    for (auto& [name, tensor] : state) {
      tensor = tensor.contiguous().cpu();
      bytes.push_back(io::bytes_of_tensor(name, tensor));
    }
    const std::string unfinished = path(step) + ".new";
    std::filesystem::remove(unfinished);
    io::FileWriter file(unfinished);
    io::write_safetensors(file, bytes);
    file.finish();
    std::filesystem::rename(unfinished, path(step));
    std::filesystem::remove(path(step - 4 * kSaveSteps));
  }

  models::Gpt net_;
  std::string folder_;
  std::optional<optim::Ema> ema_;
};

int soak(World& world, const std::string& folder, std::int64_t steps, bool bf16,
         const std::string& compile) {
  std::filesystem::create_directories(folder);
  models::Gpt net = optim::with_seed(3, [] {
    return models::Gpt(models::GptConfig{.n_layer = 6,
                                         .n_head = 8,
                                         .n_embd = 512,
                                         .vocab_size = kVocabulary,
                                         .n_positions = kLength,
                                         .embd_pdrop = 0.1,
                                         .attn_pdrop = 0.1,
                                         .resid_pdrop = 0.1});
  });
  TrainerTask task;
  task.module = net.ptr();
  task.capturable = true;
  task.loss = [net](const data::Batch& batch) mutable {
    return net->loss(batch.data, batch.target);
  };
  task.train_data = sequences(kSamples, 1);
  task.eval_data = sequences(50, 2);
  TrainingArguments a;
  a.output_dir = folder + "/out";
  a.max_steps = steps;
  a.per_device_train_batch_size = 60;  // 4096 is no multiple: each epoch ends with a short batch
  a.per_device_eval_batch_size = 16;
  a.learning_rate = 1e-3;
  a.lr_scheduler_type = "cosine";
  a.warmup_steps = 100;
  a.weight_decay = 0.1;
  (bf16 ? a.bf16 : a.fp16) = true;
  a.full_determinism = true;
  a.compile_model = compile;
  a.logging_steps = 20;
  a.eval_strategy = Interval::kSteps;
  a.eval_steps = kEvalSteps;
  a.save_steps = kSaveSteps;
  a.save_total_limit = 2;
  a.disable_tqdm = true;
  a.resume_from_checkpoint = "auto";
  Trainer trainer(world, std::move(task), a);
  trainer.add(std::make_shared<Averages>(net, folder));
  return trainer.train().exit_code();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: captured_soak FOLDER STEPS bf16|fp16 auto|false\n");
    return 2;
  }
  return lockstep::run([&](World& world) {
    return soak(world, argv[1], std::stoll(argv[2]), std::string(argv[3]) == "bf16", argv[4]);
  });
}
