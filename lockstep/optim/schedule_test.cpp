// The schedules by themselves. tests/optim checks that their values are those of Hugging Face and
// PyTorch.
#include "lockstep/optim/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"

namespace lockstep::optim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Schedule make(const std::string& name, std::int64_t warmup, std::int64_t total,
              const std::string& kwargs = "{}") {
  return make_schedule({.name = name,
                        .warmup_steps = warmup,
                        .total_steps = total,
                        .lr = 0.5,
                        .kwargs = schedule_kwargs(parse_json(kwargs, "kwargs"))});
}

std::string refusal(const std::string& name, std::int64_t warmup, std::int64_t total,
                    const std::string& kwargs = "{}") {
  try {
    make(name, warmup, total, kwargs);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "(nothing thrown)";
}

TEST(Schedule, LinearRisesToOneAndFallsToZero) {
  const Schedule linear = make("linear", 4, 12);
  EXPECT_EQ(linear.name(), "linear");
  EXPECT_EQ(linear.factor(0), 0.0);
  EXPECT_EQ(linear.factor(2), 0.5);
  EXPECT_EQ(linear.factor(4), 1.0);
  EXPECT_EQ(linear.factor(8), 0.5);
  EXPECT_EQ(linear.factor(12), 0.0);
  EXPECT_EQ(linear.factor(1000), 0.0);
}

TEST(Schedule, EveryNameStartsAtZeroWithWarmupAndReachesOne) {
  for (const std::string& name : schedule_names()) {
    const std::string kwargs = name == "cosine_with_min_lr"    ? R"({"min_lr_rate": 0.1})"
                               : name == "warmup_stable_decay" ? R"({"num_decay_steps": 5})"
                               : name == "step"                ? R"({"step_size": 7})"
                               : name == "multi_step"          ? R"({"milestones": [5, 9]})"
                               : name == "exponential"         ? R"({"gamma": 0.9})"
                                                               : "{}";
    const Schedule schedule = make(name, 10, 40, kwargs);
    if (name != "constant") {
      EXPECT_EQ(schedule.factor(0), 0.0) << name;
      EXPECT_EQ(schedule.factor(5), 0.5) << name;
    }
    EXPECT_DOUBLE_EQ(schedule.factor(10), 1.0) << name;
    for (int step = 0; step < 60; ++step) {
      EXPECT_GE(schedule.factor(step), 0.0) << name << " " << step;
      EXPECT_LE(schedule.factor(step), 1.0) << name << " " << step;
    }
  }
  EXPECT_EQ(schedule_names().size(), 12u);
}

TEST(Schedule, OptionsShapeTheEnd) {
  EXPECT_NEAR(make("cosine_with_min_lr", 0, 10, R"({"min_lr": 0.05})").factor(10), 0.1, 1e-15);
  EXPECT_DOUBLE_EQ(make("polynomial", 0, 10, R"({"lr_end": 0.1})").factor(10), 0.2);
  EXPECT_DOUBLE_EQ(make("polynomial", 0, 10, R"({"lr_end": 0, "power": 2})").factor(5), 0.25);
  EXPECT_DOUBLE_EQ(make("polynomial", 10, 10, R"({"lr_end": 0.1})").factor(10), 0.2);
  EXPECT_EQ(make("cosine_with_restarts", 0, 10, R"({"num_cycles": 2})").factor(5), 1.0);
  EXPECT_EQ(make("inverse_sqrt", 0, 0, R"({"timescale": 4})").factor(12), 0.5);
  EXPECT_EQ(make("warmup_stable_decay", 2, 0,
                 R"({"num_stable_steps": 3, "num_decay_steps": 4, "min_lr_ratio": 0.25,
                     "decay_type": "linear"})")
                .factor(7),
            0.625);
  // A key without a value is its default, as None is.
  EXPECT_EQ(make("cosine", 0, 10, R"({"num_cycles": null})").factor(10), 0.0);
}

TEST(Schedule, DecaysInSteps) {
  const Schedule step = make("step", 0, 0, R"({"step_size": 3, "gamma": 0.5})");
  EXPECT_EQ(step.factor(2), 1.0);
  EXPECT_EQ(step.factor(3), 0.5);
  EXPECT_EQ(step.factor(8), 0.25);
  EXPECT_DOUBLE_EQ(make("step", 0, 0, R"({"step_size": 1})").factor(1), 0.1);
  // In any order; a milestone that is listed twice counts twice.
  const Schedule several = make("multi_step", 0, 0, R"({"milestones": [8, 3, 8], "gamma": 0.5})");
  EXPECT_EQ(several.factor(2), 1.0);
  EXPECT_EQ(several.factor(3), 0.5);
  EXPECT_EQ(several.factor(8), 0.125);
  EXPECT_EQ(make("exponential", 0, 0, R"({"gamma": 0.5})").factor(3), 0.125);
  // After a warm-up they begin where it ends.
  EXPECT_EQ(make("step", 4, 0, R"({"step_size": 3, "gamma": 0.5})").factor(2), 0.5);
  EXPECT_EQ(make("step", 4, 0, R"({"step_size": 3, "gamma": 0.5})").factor(6), 1.0);
  EXPECT_EQ(make("step", 4, 0, R"({"step_size": 3, "gamma": 0.5})").factor(7), 0.5);
  const Schedule from_cpp = make_schedule(
      {.name = "multi_step", .kwargs = {{"milestones", std::vector<double>{2}}, {"gamma", 0.5}}});
  EXPECT_EQ(from_cpp.factor(2), 0.5);
}

TEST(Schedule, KnowsWhichHaveAnEnd) {
  EXPECT_TRUE(schedule_has_end("linear"));
  for (const char* name : {"constant", "inverse_sqrt", "step", "multi_step", "exponential", "?"})
    EXPECT_FALSE(schedule_has_end(name)) << name;
}

TEST(Schedule, RefusesWhatItCannotCompute) {
  EXPECT_THAT(refusal("step", 0, 0), HasSubstr("step needs step_size, at least 1"));
  EXPECT_THAT(refusal("step", 0, 0, R"({"step_size": 2, "gamma": -1})"),
              HasSubstr("gamma = -1 of step cannot be used. It must be a number, at least 0."));
  EXPECT_THAT(refusal("exponential", 0, 0), HasSubstr("exponential needs gamma"));
  EXPECT_THAT(refusal("multi_step", 0, 0), HasSubstr("milestones = (not given) of multi_step"));
  EXPECT_THAT(refusal("multi_step", 0, 0, R"({"milestones": []})"),
              HasSubstr("milestones = [] of multi_step cannot be used. It must be a list of whole "
                        "numbers of steps, at least one."));
  EXPECT_THAT(refusal("multi_step", 0, 0, R"({"milestones": [1, 2.5]})"),
              HasSubstr("milestones = 2.5 of multi_step"));
  EXPECT_THAT(refusal("exponential", 0, 0, R"({"gamma": [1]})"),
              HasSubstr("gamma = [1] of exponential cannot be used. It must be a number."));
  EXPECT_THAT(refusal("cosin", 0, 10),
              AllOf(HasSubstr("[schedule] there is no schedule 'cosin'. Did you mean cosine?"),
                    HasSubstr("warmup_stable_decay")));
  EXPECT_THAT(refusal("cosine", 0, 10, R"({"num_cycle": 1})"),
              HasSubstr("cosine has no option 'num_cycle'. Did you mean num_cycles? It has "
                        "num_cycles."));
  EXPECT_THAT(refusal("linear", 0, 10, R"({"power": 1})"), HasSubstr("It has none."));
  EXPECT_THAT(refusal("linear", 0, 0), HasSubstr("linear needs total_steps, and it is 0"));
  EXPECT_THAT(refusal("linear", -1, 10), HasSubstr("warmup_steps = -1 is negative"));
  EXPECT_THAT(refusal("polynomial", 0, 10, R"({"lr_end": 0.5})"),
              HasSubstr("lr_end = 0.5 of polynomial is not below the learning rate 0.5"));
  EXPECT_THAT(refusal("cosine_with_min_lr", 0, 10), HasSubstr("and neither is given"));
  EXPECT_THAT(refusal("cosine_with_min_lr", 0, 10, R"({"min_lr": 0, "min_lr_rate": 0})"),
              HasSubstr("and both are given"));
  EXPECT_THAT(refusal("warmup_stable_decay", 0, 10), HasSubstr("needs num_decay_steps"));
  EXPECT_THAT(refusal("warmup_stable_decay", 6, 10, R"({"num_decay_steps": 5})"),
              HasSubstr("6 warm-up and 5 decay steps are more than the 10"));
  EXPECT_THAT(
      refusal("warmup_stable_decay", 0, 10, R"({"num_decay_steps": 5, "decay_type": "steep"})"),
      HasSubstr("decay_type = steep of warmup_stable_decay cannot be used. It must be "
                "linear, cosine, 1-sqrt."));
  EXPECT_THAT(refusal("warmup_stable_decay", 0, 10, R"({"num_decay_steps": -5})"),
              HasSubstr("num_decay_steps = -5"));
  EXPECT_THAT(refusal("inverse_sqrt", 0, 0, R"({"timescale": 0})"), HasSubstr("timescale = 0"));
  EXPECT_THAT(refusal("cosine", 0, 10, R"({"num_cycles": "two"})"),
              HasSubstr("num_cycles = two of cosine cannot be used. It must be a number."));
  EXPECT_THAT(refusal("inverse_sqrt", 0, 0, R"({"timescale": 1.5})"), HasSubstr("timescale = 1.5"));
  EXPECT_THAT(refusal("warmup_stable_decay", 0, 10, R"({"num_decay_steps": 5, "decay_type": 1})"),
              HasSubstr("decay_type = 1 of"));
  EXPECT_THAT(refusal("cosine", 0, 10, "[1]"), HasSubstr("lr_scheduler_kwargs"));
  try {
    make_schedule({.total_steps = 5, .lr = 0, .kwargs = {{"power", 2.0}, {"decay_type", "x"}}});
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_THAT(e.what(), HasSubstr("the learning rate 0 is not a positive number"));
  }
}

}  // namespace
}  // namespace lockstep::optim
