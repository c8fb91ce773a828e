// The models and datasets that `lockstep train` brings along, from the maps `model` and `data` of a
// training file.
//
//   TrainerTask task = make_task(arguments);      // UsageError with the place of a wrong key
//
//   model: gpt | mlp           {name: gpt, n_layer: 4, n_head: 4, n_embd: 128}
//                              {name: mlp, hidden: 64, layers: 1, dropout: 0.1, batch_norm: true}
//                              {..., weights: FOLDER} begins with a folder's model.safetensors
//   data:  bytes | tokens | instructions | random
//                              {name: bytes, path: torch-headers, suffix: .h, max_bytes: 4000000}
//                              {name: tokens}, with dataset_dir
//                              {name: instructions, path: train.json, eval_path: val.json,
//                               padding: longest | max_length | packed, group_by_length: true};
//                               also pad_to_multiple_of, train_on_prompt, prompt,
//                               prompt_without_input, response
//                              {name: random, samples: 10000, features: 20, classes: 10}
#pragma once

#include "lockstep/train/trainer.h"

namespace lockstep::cli {

TrainerTask make_task(const TrainingArguments& arguments);

}  // namespace lockstep::cli
