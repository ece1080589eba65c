"What `test_parallel.py` has torchrun start: the same small training on any number of processes, or a failure on purpose."
import copy
import hashlib
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path

import torch

from rookworld_nb import trainer as trainer_module
from rookworld_nb.answers import encode_answers
from rookworld_nb.buffer import BufferConfig, Collector, CollectorConfig, CountingTask, RolloutBuffer, counting_policy
from rookworld_nb.kl import KLConfig
from rookworld_nb.positions import PromptMix
from rookworld_nb.ranks import ALONE, Ranks, agree, torchrun
from rookworld_nb.trainer import Trainer, TrainerConfig

COLLECT = {'baseline': 'group_mean', 'scale_rewards': 'batch', 'group_size': 4, 'temperature': 1., 'max_new_tokens': 2,
           'max_new_tokens_env': 3}
LEARN = {'steps': 4, 'lr': .05, 'lr_schedule': 'constant', 'warmup_steps': 0, 'grad_clip': 1e9}
#: By name: what differs from the above in the collector, the trainer and the buffer.
CASES = {
    'plain': ({}, {}, {}),
    'ema, dr_grpo, adaptive KL': ({'baseline': 'ema'}, {'loss_type': 'dr_grpo', 'kl': KLConfig(kl_control='adaptive')}, {}),
    'grpo, sequence, pieces': ({'baseline': 'leave_one_out', 'scale_rewards': 'group'},
                               {'loss_type': 'grpo', 'importance_level': 'sequence', 'micro_batch_size': 4}, {}),
    'bnpo, exact KL, truncated': ({'keep_ref_hidden': True, 'mask_truncated': True}, {'loss_type': 'bnpo', 'kl_estimator': 'forward'}, {}),
    'critic, entropy': ({'scale_rewards': 'none'}, {'use_gae': True, 'entropy_coef': .01}, {}),
    'buffer of few groups': ({}, {}, {'replays': 2, 'capacity': 2, 'minibatch_positions': 3, 'drop_tied': True}),
    'diverged': ({}, {'kl_divergence_threshold': 1e-9, 'max_recoveries': 2}, {}),
    'price of the KL': ({}, {}, {}),
    'right answers, pieces': ({}, {'answer_coef': .5, 'micro_batch_size': 2}, {}),
}


policy = cache(counting_policy)


def train(name: str, ranks: Ranks) -> dict:
    "Metrics of all steps, the gradients of each update that was made, and the weights at the end."
    collect, learn, keep = CASES[name]
    task, model, seen = CountingTask(), copy.deepcopy(policy()), []
    answers = lambda step: encode_answers(task.tokenizer, task.samples[step::7])
    learner = Trainer(model, TrainerConfig(**LEARN | learn), policy(), ranks, answers)
    learner.optimizer = torch.optim.SGD(learner.optimizer.param_groups)    # a small gradient stays a small step
    price = (lambda: 1.) if name == 'price of the KL' else None
    collector = Collector(model, learner.ref_model, task.tokenizer, PromptMix(task.samples, 6, .34), task,
                          CollectorConfig(**COLLECT | collect), price, ranks)
    step, plain = trainer_module.take_step, [p for group in learner.optimizer.param_groups for p in group['params']]

    def recording(optimizer, rate):
        seen.append(torch.cat([p.grad.flatten() for p in plain]).clone())
        step(optimizer, rate)
    trainer_module.take_step = recording
    try: rows = list(learner.run(RolloutBuffer(collector, BufferConfig(**{'replays': 2} | keep))))
    finally: trainer_module.take_step = step
    flat = torch.cat([p.detach().flatten() for p in plain])
    return {'rows': rows, 'gradients': seen, 'weights': flat, 'stop': learner.stop_reason, 'averages': dict(collector.tracker.averages),
            'digest': hashlib.sha256(flat.numpy().tobytes()).hexdigest()}


def work(folder: Path, ranks: Ranks = ALONE) -> None:
    "Train every case and keep what came out."
    torch.save({name: train(name, ranks) for name in CASES}, folder/f'{ranks.rank}-of-{ranks.size}.pt')


def late(folder: Path, ranks: Ranks) -> None:
    "The last process does not come."
    if ranks.rank == ranks.size - 1: time.sleep(120)
    ranks.gather('here')


def apart(folder: Path, ranks: Ranks) -> None:
    "The processes were given different data."
    agree(ranks, size=1, data=f'file {ranks.rank}')


if __name__ == '__main__':
    try:
        with torchrun(float(sys.argv[3]), 'cpu') as ranks: globals()[sys.argv[1]](Path(sys.argv[2]), ranks)
        left = [path.read_text().strip() for path in Path('/proc/self/task').glob('*/comm')]
        assert not [name for name in left if 'gloo' in name], left    # one that wakes while Python shuts down aborts it, now and then
    except ValueError as error:
        os.kill(os.getpid(), signal.SIGTERM)    # torchrun's, which may come before the message
        sys.exit(f'SAID {error}')
