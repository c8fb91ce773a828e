"""The orders of torch.distributed.pipelining, for pipeline_test.cpp.

    python3 pipeline_oracle.py

Prints a line per rank: schedule, ranks, stages per rank, micro-batches, rank, and its actions
("0F1 0B0": stage, forward or backward, micro-batch). GPipe and 1F1B are what their own loops call
on a stage that only writes down the calls: what _get_pipeline_order() of the latter says is not
what it runs.
"""
from torch.distributed.pipelining import schedules


class Stage:
    """Takes the place of a PipelineStage."""

    def __init__(self, index):
        self.stage_index = index
        self.is_last = False
        self.calls = []

    def forward_one_chunk(self, micro_batch, *args, **kwargs):
        self.calls.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch, *args, **kwargs):
        self.calls.append(f"{self.stage_index}B{micro_batch}")

    def __getattr__(self, name):  # messages and preparation
        return lambda *args, **kwargs: []


def calls_of(kind, ranks, micro_batches, rank):
    schedule = object.__new__(kind)
    schedule._stage = Stage(rank)
    schedule._num_stages = ranks
    schedule._n_microbatches = micro_batches
    schedule._has_backward = True
    schedule._stage_initialized = schedule._stage_forward_initialized = True
    schedule._stage_backward_initialized = True
    schedule.scale_grads = False
    for name in ("_check_inputs", "_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss",
                 "_update_losses"):
        setattr(schedule, name, lambda *args, **kwargs: None)
    schedule._check_inputs = lambda *args, **kwargs: ([()] * micro_batches, [{}] * micro_batches)
    schedule._step_microbatches()
    return schedule._stage.calls


def interleaved(ranks, stages_per_rank, micro_batches, rank):
    schedule = object.__new__(schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size = ranks
    schedule.n_local_stages = stages_per_rank
    schedule._n_microbatches = micro_batches
    schedule.number_of_rounds = max(1, micro_batches // ranks)
    if micro_batches % schedule.number_of_rounds != 0:
        return None  # which torch refuses
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    actions = schedule._calculate_single_rank_operations(rank)
    return [str(action) for action in actions if action is not None]


for ranks in range(1, 6):
    for micro_batches in range(1, 13):
        for rank in range(ranks):
            for name, kind in (("GPipe", schedules.ScheduleGPipe),
                               ("1F1B", schedules.Schedule1F1B)):
                calls = calls_of(kind, ranks, micro_batches, rank)
                print(name, ranks, 1, micro_batches, rank, *calls)
            for stages_per_rank in (1, 2, 3):
                calls = interleaved(ranks, stages_per_rank, micro_batches, rank)
                if calls is not None:
                    print("Interleaved1F1B", ranks, stages_per_rank, micro_batches, rank, *calls)
