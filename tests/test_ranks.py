"""Processes that work together, in one process: what needs no torchrun. The rest is in `test_parallel.py`."""
import contextlib
import signal

import pytest
import torch

from rookworld_nb.ranks import RankError, ToldToEnd, in_company, told_to_end


def test_a_failed_exchange_without_a_word_is_named_by_its_kind():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RankError, match='gone or late .RuntimeError.'), in_company(): raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before    # torchrun has not started this process: it can still be ended


def test_memory_that_runs_out_in_an_exchange_is_no_lost_process():
    with pytest.raises(torch.OutOfMemoryError), in_company(): raise torch.OutOfMemoryError('CUDA out of memory')


def test_who_is_told_to_end_is_not_taken_for_an_error():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ToldToEnd), contextlib.suppress(Exception): told_to_end(signal.SIGTERM, None)    # an engine's, a file's
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN    # once
    finally: signal.signal(signal.SIGTERM, before)
