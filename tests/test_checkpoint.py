"Beside 29_checkpoint: kills at any moment, and files that are not what was written."
import copy
import errno
import math
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from rookworld_nb import checkpoint
from rookworld_nb.buffer import CountingTask, counting_policy
from rookworld_nb.checkpoint import SUMS, CheckpointError, force_to_disk, remove_folder, cut_logs, file_sum, first_whole, newest_checkpoint, put_back, read_checkpoint, sweep, write_checkpoint

PARTS = counting_policy(steps=0), CountingTask().tokenizer    # a model of some kilobytes


def test_a_kill_while_a_checkpoint_is_replaced_leaves_a_whole_one_or_none(tmp_path, monkeypatch):
    folder = tmp_path/'final_checkpoint'
    steps = 0    # folders renamed or taken away before the kill
    def dying(work):
        def step(path, *rest, **options):
            nonlocal left
            left -= 1
            if left < 0 and work is shutil_rmtree and os.path.exists(path): next(path.iterdir()).unlink()
            if left < 0: raise KeyboardInterrupt
            return work(path, *rest, **options)
        return step
    os_replace, shutil_rmtree, killed = os.replace, shutil.rmtree, True
    while killed:
        shutil_rmtree(tmp_path)
        tmp_path.mkdir()
        write_checkpoint(folder, *PARTS, {'age': 'old'})
        left = steps
        monkeypatch.setattr('rookworld_nb.checkpoint.shutil.rmtree', dying(shutil_rmtree))
        monkeypatch.setattr('rookworld_nb.checkpoint.os.replace', dying(os_replace))
        try: write_checkpoint(folder, *PARTS, {'age': 'new'})
        except KeyboardInterrupt: killed = True
        else: killed = False
        monkeypatch.undo()
        put_back(tmp_path)
        assert read_checkpoint(folder)['age'] in ('old', 'new')
        steps += 1
    assert steps > 2 and read_checkpoint(folder) == {'age': 'new'} and [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize('harm', ['cut', 'flipped', 'missing', 'empty'])
@pytest.mark.parametrize('name', ['trainer.pt', 'model.safetensors', SUMS])
def test_a_corrupt_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, harm, name, caplog):
    for step in (4, 6): write_checkpoint(tmp_path/f'checkpoint-{step}', *PARTS, {'trainer': {'step': step}, 'events': []})
    path = tmp_path/'checkpoint-6'/name
    content = bytearray(path.read_bytes())
    content[len(content)//2 if name != SUMS else content.find(b'  trainer.pt') - 1] ^= 1
    if harm == 'missing': path.unlink()
    else: path.write_bytes({'cut': content[:len(content)//2], 'flipped': content, 'empty': b''}[harm])
    with pytest.raises(CheckpointError, match='checkpoint-6'): read_checkpoint(tmp_path/'checkpoint-6')
    found, state = newest_checkpoint(tmp_path)
    assert found.name == 'checkpoint-4' and state['trainer']['step'] == 4 and 'checkpoint-6' in caplog.text


def test_every_file_is_looked_at_and_named(tmp_path):
    folder = tmp_path/'checkpoint-1'
    write_checkpoint(folder, *PARTS, {'trainer': {'step': 1}})
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:-2])
        with pytest.raises(CheckpointError, match=path.name if path.name != 'SHA256SUMS' else r'\.(pt|json|safetensors)'): read_checkpoint(folder)
        path.write_bytes(content)
    assert read_checkpoint(folder) == {'trainer': {'step': 1}}


@pytest.mark.parametrize('value', [np.float64(1.), Path('a')])
def test_what_no_reader_takes_replaces_nothing(tmp_path, value):
    write_checkpoint(tmp_path/'checkpoint-1', *PARTS, {'value': 1.})
    with pytest.raises(CheckpointError, match='cannot be written: .*Unsupported global'): write_checkpoint(tmp_path/'checkpoint-1', *PARTS, {'value': value})
    diverged = copy.deepcopy(PARTS[0])
    diverged.ln_f.bias.data[0] = math.nan
    with pytest.raises(CheckpointError, match='ln_f.bias holds NaN'): write_checkpoint(tmp_path/'checkpoint-1', diverged, PARTS[1], {'value': 2.})
    assert read_checkpoint(tmp_path/'checkpoint-1') == {'value': 1.} and [path.name for path in tmp_path.iterdir()] == ['checkpoint-1']


def test_what_is_more_than_plain_values_is_passed_over(tmp_path):
    for step in (1, 2): write_checkpoint(tmp_path/f'checkpoint-{step}', *PARTS, {'value': 1.})
    folder = tmp_path/'checkpoint-2'
    torch.save({'value': np.float64(1.)}, folder/'trainer.pt')
    sums = (folder/SUMS).read_text().splitlines()
    (folder/SUMS).write_text(''.join(f'{file_sum(folder/"trainer.pt") if line.endswith("trainer.pt") else line[:64]}{line[64:]}\n' for line in sums))
    with pytest.raises(CheckpointError, match='plain values'): read_checkpoint(tmp_path/'checkpoint-2')
    assert first_whole([tmp_path/'checkpoint-2', tmp_path/'checkpoint-1'])[0].name == 'checkpoint-1'


def test_what_a_kill_left_half_written_is_swept_away(tmp_path):
    for step in (1, 3): write_checkpoint(tmp_path/f'checkpoint-{step}', *PARTS, {'step': step})
    for name in ('.checkpoint-2.part', '..checkpoint-2.part.77.partial', '.checkpoint-1.old', '.failed.part'): (tmp_path/name/'in').mkdir(parents=True)
    (tmp_path/'checkpoint-3').rename(tmp_path/'.checkpoint-3.old')    # killed between the two renamings
    (tmp_path/'.report.html.77.part').touch()    # another process writes it
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'checkpoint-1', 'checkpoint-3', '.report.html.77.part'}
    assert read_checkpoint(tmp_path/'checkpoint-3') == {'step': 3}


def test_what_is_somebody_elses_stays(tmp_path):
    for name in ('.venv.old', '.cache.part1', '.checkpoint-2.old.bak', '.mycheckpoint-2.part'): (tmp_path/name).mkdir()
    for name in ('.notes.old', '.checkpoint-7.old'): (tmp_path/name).write_text('kept')
    before = {path.name for path in tmp_path.iterdir()}
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize('going_on', [KeyboardInterrupt(), CheckpointError('checkpoint-2: cannot be written: something else')])
def test_the_reason_of_a_failure_is_its_own(tmp_path, monkeypatch, going_on):
    "Not that of the exception in whose course the checkpoint is written."
    def full(*rest): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr('rookworld_nb.checkpoint.save_pretrained', full)
    with pytest.raises(CheckpointError) as found:
        try: raise going_on
        finally: write_checkpoint(tmp_path/'final_checkpoint', *PARTS, {'value': 1})
    assert str(found.value).endswith(f'final_checkpoint: cannot be written: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}')


def test_what_the_disk_says_last_is_told_and_not_what_torch_made_of_it(tmp_path, monkeypatch):
    def full(*rest):
        try: raise RuntimeError('unexpected pos 64 vs 0')
        except RuntimeError: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr('rookworld_nb.checkpoint.save_pretrained', full)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)): write_checkpoint(tmp_path/'final_checkpoint', *PARTS, {'value': 1})


@pytest.mark.parametrize('large', ['trainer.pt', 'model.safetensors'])
def test_a_full_disk_is_named_and_leaves_the_old_checkpoint_alone(tmp_path, large):
    "No file may be larger than 1 MB; the old checkpoint is under its spare name, as after a kill between the renamings."
    folder, other, state = tmp_path/'final_checkpoint', counting_policy(steps=0), {'age': 'new'}
    write_checkpoint(folder, *PARTS, {'age': 'old'})
    folder.rename(tmp_path/'.final_checkpoint.old')
    if large == 'trainer.pt': state['much'] = torch.zeros(500_000)
    else: other.wte.weight = torch.nn.Parameter(torch.zeros(50_000, other.cfg.n_embd))
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f'final_checkpoint: cannot be written: .*{os.strerror(errno.EFBIG)}'):
            write_checkpoint(folder, other, PARTS[1], state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name] and read_checkpoint(folder) == {'age': 'old'}


def test_of_several_checkpoints_only_those_that_may_be_the_newest_are_read(tmp_path, monkeypatch):
    for name, step in (('checkpoint-2', 2), ('checkpoint-4', 4), ('final_checkpoint', 5)):
        write_checkpoint(tmp_path/name, *PARTS, {'trainer': {'step': step}, 'events': []})
    read = []
    monkeypatch.setattr(checkpoint, 'read_checkpoint', lambda folder: (read.append(folder.name), read_checkpoint(folder))[1])
    assert newest_checkpoint(tmp_path)[0].name == 'final_checkpoint' and read == ['final_checkpoint']
    write_checkpoint(tmp_path/'checkpoint-6', *PARTS, {'trainer': {'step': 6}, 'events': []})
    assert newest_checkpoint(tmp_path)[0].name == 'checkpoint-6'


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    folder, done, rename = tmp_path/'checkpoint-1', [], os.replace
    monkeypatch.setattr(checkpoint, 'force_to_disk', lambda path: done.append(path.name))
    monkeypatch.setattr(os, 'replace', lambda source, target: (rename(source, target), done.append('renamed') if target == folder else None))
    write_checkpoint(folder, *PARTS, {'value': 1.})
    assert {*done[:-2]} == {path.name for path in folder.iterdir()} | {'.checkpoint-1.part'} and done[-2:] == ['renamed', tmp_path.name]


def test_tables_of_steps_that_will_be_made_again_go(tmp_path):
    for kind in ('completions', 'skipped'):
        (tmp_path/kind).mkdir()
        for step in (3, 4, 5): (tmp_path/kind/f'step-{step:06d}.csv').touch()
    cut_logs(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.rglob('*.csv')) == ['step-000003.csv']*2 + ['step-000004.csv']*2


def test_a_folder_that_cannot_be_forced_to_disk_is_let_be_and_a_file_is_not(tmp_path, monkeypatch):
    (tmp_path/'file').write_text('x')
    def fsync(handle): raise OSError(errno.EINVAL, 'Invalid argument')
    monkeypatch.setattr(os, 'fsync', fsync)
    force_to_disk(tmp_path)
    with pytest.raises(OSError): force_to_disk(tmp_path/'file')
    monkeypatch.setattr(os, 'fsync', lambda handle: (_ for _ in ()).throw(OSError(errno.EIO, 'Input/output error')))
    with pytest.raises(OSError): force_to_disk(tmp_path)


def test_what_cannot_be_removed_is_named_and_ends_nothing(tmp_path, monkeypatch, caplog):
    for name in ('.checkpoint-2.part', '.checkpoint-4.part'): (tmp_path/name).mkdir()
    real = shutil.rmtree
    def rmtree(path):
        if path.name == '.checkpoint-2.part': raise OSError(errno.EBUSY, 'Device or resource busy')
        real(path)
    monkeypatch.setattr(checkpoint.shutil, 'rmtree', rmtree)
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['.checkpoint-2.part'] and '.checkpoint-2.part: cannot be removed' in caplog.text
    remove_folder(tmp_path/'.checkpoint-2.part')
