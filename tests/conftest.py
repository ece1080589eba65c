"""What several files of tests share. Properties are tried on the same examples in every run, so that a red light means a change;
`pytest --hypothesis-profile=varied` looks for new ones."""
import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from rookworld_nb.buffer import counting_policy
from rookworld_nb.positions import by_task, shipped, write_lines
from rookworld_nb.rules import EngineNotFoundError, find_stockfish

settings.register_profile('varied', deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
settings.register_profile('repeatable', settings.get_profile('varied'), derandomize=True)
settings.load_profile('repeatable')


def pytest_runtest_setup(item):
    "What is marked `stockfish` is skipped where there is no engine."
    if item.get_closest_marker('stockfish'):
        try: find_stockfish()
        except EngineNotFoundError as error: pytest.skip(str(error))


@pytest.fixture(scope='session')
def lines(tmp_path_factory) -> str:
    "A small file of prompts: the shipped ones take seconds to read."
    path, pools = tmp_path_factory.mktemp('lines')/'lines.txt', by_task(shipped('train'))
    write_lines(pools['P'][-24:] + pools['A'][-8:], path)
    return str(path)


@pytest.fixture(scope='session')
def base():
    "The policy of the toy; tests only read it."
    return counting_policy()


@pytest.fixture(autouse=True)
def settings_of_the_process():
    "A run sets the level of float32 products for its process, on some machines to another than torch's own, a pre-training its threads: not for the next test."
    threads = torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision('highest')
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope='module')
def little_to_collect():
    "What collects garbage on purpose, as a search for a batch does, looks at what is new: not at the millions of objects of modules and data."
    gc.collect()
    gc.freeze()


@pytest.fixture
def put_back(monkeypatch):
    "No setting of CUDA's allocator to begin with; afterwards what a run sets for its process is as it was."
    for name in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.backends.cudnn.benchmark = False
    os.environ.pop('PYTORCH_CUDA_ALLOC_CONF', None)
