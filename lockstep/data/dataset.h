// Datasets: samples numbered from 0, each readable at any time from any thread.
//
// The loader's workers are threads of this process. get() is therefore const and must be safe to
// call from several threads at once; a dataset of torch::data, which need not be, is copied once
// per thread that uses it, as torch's own loader does.
//
//   auto mnist = make_dataset(torch::data::datasets::MNIST("data"));        // any of torch::data
//   auto squares = make_dataset(100, [](std::int64_t i, SampleRandom&) {    // any callable
//     return Example{torch::tensor(float(i)), torch::tensor(float(i * i))};
//   });
//   auto in_memory = std::make_shared<TensorDataset>(images, labels);
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/data/batch.h"

namespace lockstep::data {

using Indices = std::span<const std::int64_t>;

// Shared by the loaders that read it; any number of threads call its const functions.
class Dataset {
 public:
  virtual ~Dataset() = default;

  virtual std::int64_t size() const = 0;
  virtual Example get(std::int64_t index, SampleRandom& random) const = 0;

  // Combines samples into a batch; the loader's option overrides it. stack() by default.
  virtual Batch collate(std::vector<Example> examples) const;
  // Returns a whole batch at once, for datasets that are faster that way; if nullopt, get() and
  // collate() are used. The loader fills in `indices`.
  virtual std::optional<Batch> get_batch(Indices indices, const RandomKey& key) const;
};

using DatasetPtr = std::shared_ptr<const Dataset>;

// A torch generator seeded with the sample's state, for at::rand(..., generator) and the like.
at::Generator generator(SampleRandom& random);

// Tensors whose first dimension counts samples; `targets` may be undefined. A batch is one
// index_select, without reading single samples.
class TensorDataset : public Dataset {
 public:
  explicit TensorDataset(at::Tensor data, at::Tensor targets = {});

  std::int64_t size() const override;
  Example get(std::int64_t index, SampleRandom& random) const override;
  std::optional<Batch> get_batch(Indices indices, const RandomKey& key) const override;

 private:
  at::Tensor data_;
  at::Tensor targets_;
};

using GetExample = std::function<Example(std::int64_t index, SampleRandom& random)>;

// `get` is called from several threads at once. Throws UsageError for a negative size.
DatasetPtr make_dataset(std::int64_t size, GetExample get);

namespace detail {

template <typename T>
concept TorchDataset = requires(T dataset, const std::vector<std::size_t>& indices) {
  dataset.get_batch(indices);
  { dataset.size().has_value() } -> std::convertible_to<bool>;
};

// torch::data::Example<> and TensorExample, recognized by their members, so that this header does
// not include torch::data.
template <typename T>
Example to_example(T&& example) {
  if constexpr (requires { example.target; })
    return {.data = example.data, .target = example.target};
  else
    return {.data = example.data};
}

// A batch that a dataset has stacked itself, and the inverse for a batch of one sample.
Batch batch_of(Example stacked, std::int64_t samples);
Example only_sample(const Example& stacked);

template <TorchDataset T>
class TorchDatasetAdapter : public Dataset {
 public:
  explicit TorchDatasetAdapter(T dataset) : prototype_(std::move(dataset)) {}

  std::int64_t size() const override { return static_cast<std::int64_t>(*prototype_.size()); }

  Example get(std::int64_t index, SampleRandom&) const override {
    const std::vector<std::size_t> one{static_cast<std::size_t>(index)};
    return with_copy([&](T& dataset) {
      auto got = dataset.get_batch(one);
      if constexpr (requires { got.front(); })
        return to_example(got.front());
      else
        return only_sample(to_example(got));
    });
  }

  std::optional<Batch> get_batch(Indices indices, const RandomKey&) const override {
    const std::vector<std::size_t> wanted(indices.begin(), indices.end());
    return with_copy([&](T& dataset) -> std::optional<Batch> {
      auto got = dataset.get_batch(wanted);
      if constexpr (requires { got.front(); }) {
        std::vector<Example> examples;
        for (auto& example : got) {
          examples.push_back(to_example(example));
          examples.back().index = indices[examples.size() - 1];
        }
        return collate(std::move(examples));
      } else {
        return batch_of(to_example(got), static_cast<std::int64_t>(indices.size()));
      }
    });
  }

 private:
  // One copy per concurrent call; the prototype itself is only ever copied.
  template <typename Use>
  auto with_copy(Use&& use) const {
    std::unique_ptr<T> copy;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        copy = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (copy == nullptr) copy = std::make_unique<T>(prototype_);
    auto result = use(*copy);
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(copy));
    return result;
  }

  const T prototype_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<T>> free_;
};

void check_sized(bool sized);

}  // namespace detail

// Any dataset of torch::data that knows its size, also a mapped one. It draws its own random
// numbers, if any, and does not use SampleRandom.
template <detail::TorchDataset T>
DatasetPtr make_dataset(T dataset) {
  detail::check_sized(dataset.size().has_value());
  return std::make_shared<detail::TorchDatasetAdapter<T>>(std::move(dataset));
}

}  // namespace lockstep::data
