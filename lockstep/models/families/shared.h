// Option lists and spec builders shared by the families of this folder. Internal to it.
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

// `own` replaces options of the same key in `all`; other options are appended.
std::vector<Option> with_options(std::vector<Option> all, const std::vector<Option>& own);
// The fields that most families since Llama have in common, with those in `own`.
std::vector<Option> rms_options(const std::vector<Option>& own);
// A size that is derived if null: the number of key and value heads, the width of a head.
Option count_option(std::string_view key, std::int64_t fallback);
// A field with a value that the models here do not compute.
Option must_be(std::string_view key, bool value);
// An upper bound, far above every real model.
constexpr double kMostLayers = 1000;
constexpr double kMostExperts = 1000;  // of a layer
// num_hidden_layers.
Option layers_option(std::int64_t fallback);
// The size of the attention window in tokens; null: all previous tokens.
Option window_option(std::int64_t fallback);

// The model that these fields describe: RMSNorm before attention and a gated perceptron, separate
// projections, rotary positions of the whole head. attention_bias, mlp_bias, sliding_window (of all
// blocks) and resid_pdrop apply if the family has them.
DecoderSpec rms_decoder(std::string_view family, const Options& options);

// layer_types names the blocks with the window; without that field, `slides` does.
void set_windows(DecoderSpec& spec, const Options& options,
                 const std::function<bool(std::int64_t layer)>& slides);

// Replaces several projections by one packed matrix, under that module's name.
void pack(std::vector<Projection>& projections, std::string_view name);

}  // namespace lockstep::models::families
