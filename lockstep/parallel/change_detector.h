// ChangeDetector: whether the model is still what its buckets were laid out for, here and on the
// other ranks. Parameters may have been frozen, unfrozen, reshaped or moved to another dtype or
// device. Such a model is refused, by name and on all ranks: it is wrapped again.
//
//   if (changes.look()) ...            // at the beginning of a pass
//   changes.send_flag(buckets.flag()); // with the first bucket
//   changes.flag();                    // at its end: not zero where some rank's model has changed
//   changes.refuse();                  // then, on every rank
//
// A rank that changed cannot know whether the others did, and an exchange in every step would cost
// too much. So it takes part once more in the pass that the others may be in: the buckets as zeros,
// with a change flag behind the first one's gradients. Everyone reads the flag when that pass ends,
// and then all ranks tell each other what has changed. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <string>
#include <vector>

#include "lockstep/parallel/model_tensors.h"

namespace lockstep::parallel {

class ChangeDetector {
 public:
  ChangeDetector(World& world, const ModelTensors& model, const DdpOptions& options)
      : world_(world), model_(model), options_(options) {}

  void accept();  // buckets are laid out for the model as it is now
  const std::vector<ParameterForm>& forms() const { return forms_; }
  bool trained(std::size_t parameter) const { return forms_[parameter].requires_grad; }

  bool changed() const;
  bool look() { return stale_ = changed(); }
  bool stale() const { return stale_; }  // what the last look() found

  // Throws UsageError on all ranks where the models differ, or where one has a refusal. Collective.
  void check_same_model(std::exception_ptr refusal = {}) const;
  // Throws UsageError naming a parameter that has changed `since`.
  void check_unchanged(const char* since) const;
  // Throws UsageError on all ranks, with what has changed on which of them. Collective.
  [[noreturn]] void refuse() const;

  // `carrier` is one element that will be reduced with other things; undefined: a message of its
  // own, collective.
  void send_flag(at::Tensor carrier);
  const at::Tensor& flag();  // waits for that message; a carrier was waited for by the caller

 private:
  std::string describe() const;
  std::string change_of(std::size_t parameter) const;  // such as frozen; empty: none

  World& world_;
  const ModelTensors& model_;
  const DdpOptions& options_;
  std::vector<ParameterForm> forms_;  // by parameter
  bool stale_ = false;
  at::Tensor flag_;
  Work flag_work_;
};

}  // namespace lockstep::parallel
