"Training on several processes: the same run on 1, 2 and 4, one message where something fails, and a checkpoint that any number goes on from."
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from rookworld_nb import cli
from rookworld_nb.buffer import Experience, RolloutPart, of_all, share_of, without_end
from rookworld_nb.checkpoint import read_checkpoint
from rookworld_nb.config import RunError, TrainConfig
from rookworld_nb.evaluate import evaluate
from rookworld_nb.hardware import HardwareError
from rookworld_nb.positions import Sample, shipped, write_lines
from rookworld_nb.ranks import ALONE, RankError, Ranks, agree, torch_device, torchrun
from rookworld_nb.records import metric_rows
from rookworld_nb.rewards import RewardConfig, RewardScorer
from rookworld_nb.run import Run, resumed_config, starting_config
from rookworld_nb.sampling import Rollouts
from rookworld_nb.weights import load_pretrained
import parallel_worker
from processes import children_of
from short_runs import TINY, without_clocks

TESTS = Path(__file__).resolve().parent

TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone']


def launch(processes, *words, **options):
    "Start torchrun as a user would."
    here = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(TESTS.parent)}
    return subprocess.Popen([*TORCHRUN, '--nproc-per-node', str(processes), *map(str, words)], env=here, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def ended(started, seconds=300):
    "Exit code and standard error, within a time."
    try:
        return started.returncode if started.wait(seconds) is None else started.returncode, started.communicate()[1]
    finally:
        started.kill()


# ---- the same run

@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)    # as torchrun does for each process: other sums have other roundings
    yield {name: parallel_worker.train(name, ALONE) for name in parallel_worker.CASES}
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize('processes', [2, 4])
def test_any_number_of_processes_gives_the_same_run(alone, processes, tmp_path):
    code, said = ended(launch(processes, TESTS/'parallel_worker.py', 'work', tmp_path, 60))
    assert code == 0, said
    several = [torch.load(tmp_path/f'{rank}-of-{processes}.pt') for rank in range(processes)]
    for name, one in alone.items():
        for run in several:
            assert len(run[name]['gradients']) == len(one['gradients']) and run[name]['stop'] == one['stop']
            for mine, other in zip(one['gradients'], run[name]['gradients']): assert_close(other, mine, atol=1e-6, rtol=1e-5)
            assert_close(run[name]['weights'], one['weights'], atol=1e-6, rtol=1e-5)
            assert run[name]['averages'] == pytest.approx(one['averages'], abs=1e-6)
            for mine, other in zip(one['rows'], run[name]['rows'], strict=True):
                assert without_clocks(other) == pytest.approx(without_clocks(mine), abs=2e-6, rel=1e-4, nan_ok=True)
        assert len({run[name]['digest'] for run in several}) == 1    # to the bit
    assert len(alone['plain']['gradients']) == 4 and len(alone['diverged']['gradients']) < 4
    assert any(gradient.abs().max() > 1e-3 for gradient in alone['plain']['gradients'])


@given(st.integers(0, 50), st.integers(1, 9))
def test_every_thing_has_one_owner(n, size):
    parts = [range(n)[Ranks(rank, size).share(n)] for rank in range(size)]
    assert [i for part in parts for i in part] == [*range(n)] and max(map(len, parts)) - min(map(len, parts)) <= 1


def groups_of(task, prompts, length):
    "A task's groups of 2, as far as their sizes are concerned."
    zeros, rows = torch.zeros(prompts, 4, dtype=torch.int64), torch.zeros(2*prompts, length)
    rollouts = Rollouts(zeros, zeros.bool(), rows.long(), rows.bool(), rows, ['']*2*prompts, 2, .9)
    table = pd.DataFrame({'row': range(2*prompts)})
    return RolloutPart(task, tuple(Sample(f'{task}: {n}', '') for n in range(prompts)), rollouts, rows[:, 0], rows[:, 0], None, None, table, rows[:, 0].bool(), rows.bool())


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 80), st.integers(1, 80), st.integers(1, 9))
def test_a_batch_is_shared_by_work_and_keeps_its_order(policies, environments, short, long, size):
    parts = groups_of('P', policies, short), groups_of('A', environments, long)
    whole, width = Experience(parts, 2, 80, 0, 1.), 16
    found = [share_of(whole, Ranks(rank, size), width).parts for rank in range(size)]
    assert [sample for mine in found for part in mine for sample in part.samples] == [sample for part in parts for sample in part.samples]
    one = {part.task: (4 + 2*length)*(6*width + 4 + length) for part, length in zip(parts, (short, long))}
    work = [sum(one[part.task]*len(part.samples) for part in mine) for mine in found]
    assert max(work) <= sum(work)/size + max(one.values())


# ---- threads in the place of processes

class Threads(Ranks):
    "Ranks that are threads of this process, for what needs no torchrun."
    def gather(self, value):
        self.board[self.rank] = value
        self.barrier.wait(60)
        found = list(self.board)
        self.barrier.wait(60)
        return found


def together(size, function):
    "What a function of ranks returns on each of some threads."
    shared, found = type('Board', (Threads,), {'board': [None]*size, 'barrier': threading.Barrier(size)}), [None]*size

    def run(rank): found[rank] = function(shared(rank, size))
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return found


def test_scoring_is_shared_and_counted_as_one():
    samples, judged = shipped('heldout')[:5] + shipped('heldout')[-6:], []
    prompts, texts = [s.prompt for s in samples], [s.completion for s in samples[3:]] + [s.completion for s in samples[:3]]
    config = RewardConfig(normalize_rewards=True, reward_warmup_steps=4)

    def score(ranks):
        def counting(judge, *columns): return ranks.spread(lambda *mine: (judged.append(len(mine[0])), judge(*mine))[1], *columns)
        scorer = RewardScorer(config, None, counting if ranks.size > 1 else ranks.spread)
        return [scorer(prompts, texts, [s.completion for s in samples]) for _ in range(2)], scorer.state_dict()
    (plain, state), = [score(ALONE)]
    for found, theirs in together(3, score):
        assert theirs == state
        for mine, other in zip(plain, found): assert other.rewards.equal(mine.rewards) and other.components.equals(mine.components)
    assert sorted(judged) == [3, 3, 4, 4, 4, 4]


def test_completions_of_all_are_padded_with_the_end_token_and_the_cut_off_ones_found():
    def asked(rank):    # one completion each, of two tokens and of three; the second is cut off
        ids, true = torch.arange(4, 6 + rank)[None], torch.ones(1, 2 + rank, dtype=torch.bool)
        return Rollouts(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool), ids, true, true.float(), [''], 1, .9)
    for whole, (value, none) in together(2, lambda ranks: of_all(ranks, asked(ranks.rank), (torch.ones(1, 2 + ranks.rank), None), 5)):
        assert whole.completion_ids.tolist() == [[4, 5, 5], [4, 5, 6]] and whole.completion_mask.tolist() == [[True, True, False], [True]*3]
        assert without_end(whole, 5).tolist() == [False, True] and value.tolist() == [[1, 1, 0], [1, 1, 1]] and none is None


def test_evaluation_is_shared_and_the_same():
    model, tokenizer = load_pretrained('nano')
    samples = shipped('heldout')[:5] + shipped('heldout')[-4:]
    options = dict(temperature=.9, seed=2, samples_per_prompt=2, max_new_tokens=20, batch_size=2)
    plain = evaluate(model, tokenizer, samples, **options)
    for found in together(2, lambda ranks: evaluate(model, tokenizer, samples, **options, ranks=ranks)):
        assert found.equals(plain)


# ---- what cannot work is said, once

@pytest.mark.slow
@pytest.mark.parametrize('mode, timeout, words', [('late', 3, ['another process is gone or late']),
                                                  ('apart', 60, ['data: process', 'has file 0', 'has file 1'])])
def test_one_process_speaks_for_all(mode, timeout, words, tmp_path):
    start = time.monotonic()
    code, said = ended(launch(2, TESTS/'parallel_worker.py', mode, tmp_path, timeout))
    spoken = [line for line in said.splitlines() if line.startswith('SAID')]
    assert code != 0 and len(spoken) == 1 and all(word in spoken[0] for word in words) and time.monotonic() - start < 100


def test_a_run_whose_batch_was_searched_for_goes_on_in_several_processes(tmp_path):
    (tmp_path/'config.json').write_text(json.dumps(asdict(TrainConfig(auto_batch_size=True, batch_positions=6).for_size(1))))
    assert starting_config(resumed_config(output_dir=str(tmp_path)), Ranks(0, 2)).batch_positions == 6


def test_what_several_processes_cannot_do():
    with pytest.raises(RunError, match='--auto-batch-size: not with torchrun'):
        Run(TrainConfig(auto_batch_size=True), Ranks(0, 2))
    with pytest.raises(HardwareError, match='--device cuda: a GPU for each process, and this machine has'):
        torch_device('cuda', Ranks(99, 100, 99))
    with pytest.raises(ValueError, match='--rank-timeout 0: must be finite and above 0'), torchrun(0): pass
    with torchrun() as ranks: assert ranks is ALONE
    assert replace(ALONE, rank=1, size=2).first is False and ALONE.first


def test_ranks_that_differ_are_refused():
    def differ(ranks):
        with pytest.raises(RankError, match=f'weights: process {ranks.rank} of 2'): agree(ranks, step=3, weights=ranks.rank)
        agree(ranks, step=3)
        return True
    assert together(2, differ) == [True, True]


# ---- killed

@pytest.fixture(scope='module')
def small(tmp_path_factory):
    "A tiny model with nano's tokenizer, and a few prompts."
    folder = tmp_path_factory.mktemp('small')
    shutil.copytree(TINY.model, folder/'model')
    write_lines(shipped('train')[:8] + shipped('train')[-8:], folder/'data.txt')
    return folder


def rank_of(process):
    "The rank that torchrun gave a process; None for others."
    try:
        found = re.search(rb'\0RANK=(\d+)\0', Path(f'/proc/{process}/environ').read_bytes())
        return found and int(found[1])
    except OSError:
        return None


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self/environ').exists(), reason='finds the processes in /proc')
@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_rank_ends_the_run_and_one_process_goes_on(small, victim, tmp_path):
    folder, flags = tmp_path/'run', {'--model': small/'model', '--data': small/'data.txt', '--batch-positions': 4, '--group-size': 2, '--eval-policy': 0,
                                     '--eval-env': 0, '--max-new-tokens': 6, '--device': 'cpu', '--mix-env-ratio': .5, '--rank-timeout': 30}
    words = ['train', *(str(word) for pair in flags.items() for word in pair), '--output-dir', str(folder)]
    started = launch(2, '-m', 'rookworld_nb.cli', *words, '--steps', 100000, '--save-every', 2)
    try:
        while not (folder/'checkpoint-4').exists():
            assert started.poll() is None, started.communicate()[1]
            time.sleep(.05)
        os.kill(next(child for child in children_of(started.pid) if rank_of(child) == victim), signal.SIGKILL)
        killed = time.monotonic()
    except BaseException:
        started.kill()
        raise
    code, said = ended(started)
    assert code != 0 and time.monotonic() - killed < 90
    spoken = [line for line in said.splitlines() if 'rookworld train:' in line]
    assert len(spoken) == 1 and 'another process' in spoken[0] and '--resume' in spoken[0]
    newest = max(folder.glob('checkpoint-*'), key=lambda path: int(path.name[11:]))
    step = read_checkpoint(newest)['trainer']['step']
    load_pretrained(str(newest))
    assert (folder/'final_checkpoint'/'model.safetensors').exists() == (victim == 1)    # rank 0 alone writes
    assert cli.main(['train', '--resume', '--output-dir', str(folder), '--steps', str(step + 3)]) == 0
    rows = metric_rows(folder/'metrics.jsonl')
    assert [row['step'] for row in rows] == [*range(1, step + 4)]
    assert json.loads((folder/'config.json').read_text())['steps'] == step + 3


@pytest.mark.slow
def test_a_run_begun_alone_goes_on_with_two(small, tmp_path):
    words = ['train', '--model', small/'model', '--data', small/'data.txt', '--batch-positions', 4, '--group-size', 2, '--eval-policy', 0,
             '--eval-env', 0, '--max-new-tokens', 6, '--device', 'cpu', '--lr-schedule', 'constant', '--warmup-steps', 0, '--save-every', 2]
    words = [*map(str, words)]
    for name, steps in (('whole', 4), ('parts', 2)):
        assert cli.main([*words, '--output-dir', str(tmp_path/name), '--steps', str(steps)]) == 0
    code, said = ended(launch(2, '-m', 'rookworld_nb.cli', 'train', '--resume', '--output-dir', tmp_path/'parts', '--steps', 4))
    assert code == 0 and said.count('First-update') == 0, said
    whole, parts = (metric_rows(tmp_path/name/'metrics.jsonl') for name in ('whole', 'parts'))
    for mine, other in zip(whole, parts, strict=True): assert without_clocks(other) == pytest.approx(without_clocks(mine), abs=1e-5, rel=1e-3, nan_ok=True)
