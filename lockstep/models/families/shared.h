// What the files of this folder share. Internal; family.h is what others use.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "lockstep/models/family.h"

namespace lockstep::models::families {

const Family& gemma2();
const Family& gpt2();
const Family& llama();
const Family& mistral();
const Family& mixtral();
const Family& phi3();
const Family& qwen2();
const Family& qwen3();
const Family& starcoder2();

Options options_of(const GptConfig& config);
Options options_of(const LlamaConfig& config);

// `own` takes the place of those of the same key, and follows otherwise.
std::vector<Option> with_options(std::vector<Option> all, const std::vector<Option>& own);
// The fields that families after Llama have in common, with `own`.
std::vector<Option> rms_options(const std::vector<Option>& own);
// A size that follows from others where it is null: heads of keys and values, the width of a head.
Option count_option(std::string_view key, std::int64_t fallback);
// Far above every model's.
constexpr double kMostLayers = 1000;
constexpr double kMostExperts = 1000;  // of a layer
// num_hidden_layers.
Option layers_option(std::int64_t fallback);
// How many tokens a token sees; null: all before it.
Option window_option(std::int64_t fallback);

// What these fields describe: RMSNorm before attention and a gated perceptron, separate
// projections, rotary positions of the whole head. attention_bias, mlp_bias, sliding_window (of
// all blocks) and resid_pdrop count where the family has them.
DecoderSpec rms_decoder(std::string_view family, const Options& options);

// The window is that of blocks which layer_types names; without that field, of those that `slides`.
void set_windows(DecoderSpec& spec, const Options& options,
                 const std::function<bool(std::int64_t layer)>& slides);

// One matrix instead of several, by the name of its module.
void pack(std::vector<Projection>& projections, std::string_view name);

}  // namespace lockstep::models::families
