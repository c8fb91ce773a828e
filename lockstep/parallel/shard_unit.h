// ShardUnit: parameters that are gathered together, each divided by rows over ranks.
//
//   ShardUnit unit("blocks.0", parameters, shard);   // frees them
//   unit.begin_gather({});        // optional; under way while something else computes
//   unit.gather({});              // the parameters are whole, in the storages that they had
//   unit.free();
//   unit.begin_reduce();          // of .grad, which is empty then
//   unit.end_reduce(data);        // the average is added to `grad` of each parameter
//
// A graph's saved tensors refer to a parameter's storage and views of it. So the storage stays, and
// its bytes come and go without changing a version counter: the values are the same each time.
// While it has none, the parameter points at another storage, which throws the parameter's name
// when it is accessed.
//
// Rows may lie in the host's memory while a device computes (offload), or in memory that all ranks
// map (share), which holds whole parameters: gathering then points at them, and whoever writes rows
// must ensure that no rank reads them meanwhile.
//
// In a world of one nothing is ever freed, unless it is offloaded. Nor is it after keep(), where
// rows are a part of the whole parameter (kept_rows.h). One thread at a time; begin_ and end_
// communicate.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/nn/divided.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/parallel/sharding.h"

namespace lockstep::parallel {

// The component's name in errors.
inline constexpr const char* kFullyShard = "fully_shard";
inline constexpr const char* kPipeline = "pipeline";

struct SlicedParameter;  // tensor_slices.h

struct ShardedParameter {
  std::string name;
  at::Tensor tensor;  // the module's
  RowCut cut;
  at::Tensor shard{};      // this rank's rows, which the optimizer steps
  at::Tensor grad{};       // of them, averaged, while a backward runs
  c10::Storage storage{};  // of `tensor` while it is whole
  c10::Storage freed{};    // and while it is not
  nn::RowsPtr rows{};      // what other code sees then
  at::Tensor shared{};     // all rows, flat, in memory that all ranks map; undefined: in none
  bool product = false;    // one of nn::Block::products()
  nn::Range amax{};        // those of its list among set_amax()'s; empty: fp8 does not cover it
  // The ranks along "pipeline" whose stages read it, in order; the first one's copy counts and is
  // gathered. `absent`: this rank is none of them, and holds no rows.
  std::vector<int> holders{0};
  bool absent = false;
  const SlicedParameter* sliced = nullptr;  // `tensor` is one rank's slice along "tensor"
};

// The types in which parameters and gradients are sent; unset: their own.
struct TravelTypes {
  std::optional<at::ScalarType> gather{}, reduce{};
};

// The type in which a block's products (nn::Block::products) are computed and sent; unset: their
// own. In tensorwise fp8 each list has one scale; rowwise they are sent in their own type.
struct ProductType {
  std::optional<at::ScalarType> type{};
  std::optional<nn::Fp8Recipe> fp8{};
  bool operator==(const ProductType&) const = default;
};

class ShardUnit {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  // Each parameter gets memory of its own if it had none. `shard` outlives this.
  ShardUnit(std::string name, const Named& parameters, World& shard);

  // For a unit made before its module was part of a model: sets its final names, and adds
  // parameters that the module was given since. UsageError for a parameter that `all` lacks.
  void complete(std::string name, const Named& all);

  const std::string& name() const { return name_; }
  const World& shard() const { return *shard_; }
  std::vector<ShardedParameter>& parameters() { return parameters_; }
  bool whole() const { return whole_; }
  bool trains() const;
  void check_gradients() const;  // UsageError for a .grad that is not of the whole parameter

  // Gathers again what is in progress, or gathered, in another type.
  void begin_gather(const ProductType& computed);
  void gather(const ProductType& computed);
  void free();  // no collective
  // Drops operations in progress without waiting; they complete by themselves.
  void forget_work() {
    forget_gathers();
    reduces_.clear();
  }
  // Copies the parameters' values into the shards. No collective.
  void take_whole();
  // Moves the rows, before an optimizer has them: to the host's memory, and gradients too, unless
  // the parameters are there already; or to `places`, one flat tensor of that length for each
  // parameter. No collective.
  void offload();
  void share(const std::vector<at::Tensor>& places);
  // Parameters are whole from here on, as plain tensors, in memory of this rank's own or in that of
  // share(). `by_blocks`: a rank's rows are elements, flat, cut by cut_blocks(). Collective where
  // they were divided.
  void keep(bool by_blocks);
  // Call it before the first gather.
  void set_products(const std::vector<std::vector<at::Tensor>>& products);
  // This rank's rows of the products that fp8 covers; and the largest magnitudes of all ranks' rows
  // of these, in that order. Until they are set nothing is sent in fp8. No collective.
  std::vector<at::Tensor> fp8_rows() const;
  void set_amax(at::Tensor amax) { amax_ = std::move(amax); }
  // Sets the types to send in, while nothing is in progress. Gathered values are rounded to them.
  void travel_as(const TravelTypes& types) { types_ = types; }
  // Gathers unrounded values into memory of this rank's own.
  void gather_exactly();
  bool exact() const { return whole_ && !for_computing_; }

  void begin_reduce();
  void end_reduce(World& data);

 private:
  // The parameters of one type on one device, which are sent together.
  struct Flat {
    at::Tensor shard;  // the rows of all, each with its padding; undefined where they are shared
    std::vector<std::size_t> members;
  };
  struct Gather {
    at::Tensor parts;  // the bytes of each rank
    Packing packing;
    Work work;
  };
  struct Reduce {
    std::vector<std::size_t> members;
    std::vector<bool> had_gradient;
    at::Tensor mine;  // this rank's rows of each, and for each whether any rank had a gradient
    Work work;
  };
  void add(const std::string& name, const at::Tensor& tensor, std::size_t first_flat);
  void lay_out(Flat& flat);
  void place_rows(ShardedParameter& p, const at::Tensor& memory, std::int64_t offset);
  bool stays_whole() const { return (shard_->size() == 1 && !offloads_) || keeps_; }
  c10::Device device_of(const Flat& flat) const {
    return parameters_[flat.members[0]].tensor.device();
  }
  void begin_gathers(const TravelTypes& types, const ProductType& computed);
  Packing packing_of(const Flat& flat, const TravelTypes& types, const ProductType& computed) const;
  void end_gathers();
  void forget_gathers();
  void gather_shared(bool copies);
  void make_whole(ShardedParameter& p, at::Tensor fresh);
  void take(ShardedParameter& p);
  static void free(ShardedParameter& p);
  Reduce reduce(const Flat& flat);
  void add_reduced(const Reduce& reduced);

  std::string name_;
  World* shard_;
  std::vector<ShardedParameter> parameters_;
  std::vector<Flat> flats_;
  std::vector<Gather> gathers_;
  std::vector<Reduce> reduces_;
  TravelTypes types_;
  ProductType computed_;  // what is gathered is for it
  std::vector<std::size_t> fp8_members_;
  at::Tensor amax_;
  bool whole_ = true;
  bool for_computing_ = false;  // what is whole: rounded, or memory that other ranks read
  bool offloads_ = false;
  bool shares_ = false;
  bool keeps_ = false;
};

// Moves the rows of all units into memory that all ranks map. False, without a change: the backend
// has no such memory, or parameters are on a device. UsageError on every rank where one of them
// lacks the room. Collective; other ranks may read the rows after one more collective.
bool share_rows(std::vector<ShardUnit>& units, World& shard);

// Offloaded rows are copied asynchronously; waits until no copy reads them any more.
void wait_for_copies(c10::Device device);

}  // namespace lockstep::parallel
