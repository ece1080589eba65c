"""Processes that work together, in one process: what needs no torchrun. The rest is in `test_parallel.py`."""
import signal

import pytest
import torch

from rookworld_nb.ranks import RankError, in_company


def test_a_failed_exchange_without_a_word_is_named_by_its_kind():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RankError, match='gone or late .RuntimeError.'), in_company(): raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before    # torchrun has not started this process: it can still be ended


def test_memory_that_runs_out_in_an_exchange_is_no_lost_process():
    with pytest.raises(torch.OutOfMemoryError), in_company(): raise torch.OutOfMemoryError('CUDA out of memory')
