"How nano is made: tokenizer, generated data, weights of the loss, resumable training."
import json
import math
import os
import random
import re
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import chess
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookworld_nb import pretrain as pretrain_module
from rookworld_nb.positions import (PUZZLES, Sample, by_task, generate_positions, locked, outcome, random_play, read_lines, seen_positions,
                                    shipped, write_lines)
from rookworld_nb.pretrain import (ENV_SHARES, HELD_SHARDS, ILLEGAL_SHARES, PROMPT_TOKENS, PretrainConfig, PretrainError, Rows,
                                   batches, board_tokenizer, completion_loss, completion_mask, env_sample, exposes_king, find_kind,
                                   first_model, illegal_move, make_env_data, make_policy_data,
                                   make_prompts, make_stress, move_kind, pack, policy_sample, prepare, pretrain,
                                   ranked, read_excluded, token_weights, train, verdict, verdicts, whole_shard,
                                   with_rare_outcomes)
from rookworld_nb.model import GPT, GPTConfig
from rookworld_nb.rules import Candidate, env_step, fen_key, legal_moves
from rookworld_nb.suites import shipped_puzzles
from rookworld_nb.tasks import parse_env, parse_policy
from rookworld_nb.weights import load_pretrained

TOKENIZER = board_tokenizer()
FENS = [position.fen for position in generate_positions(60, seed=5)]
#: Middle games in which a move of one's own can leave the king in check.
EXPOSED = [board for board in map(chess.Board, FENS[12:48]) if len([*board.pseudo_legal_moves]) > board.legal_moves.count()]


def rows_of(kind, n=40):
    samples = [sample for sample in shipped('train') if sample.task == kind][:n]
    return pack(kind, [(sample.prompt, sample.completion) for sample in samples], TOKENIZER)


def soon(happens, seconds=60) -> bool:
    "Wait for something."
    until = time.monotonic() + seconds
    while not (done := happens()) and time.monotonic() < until: time.sleep(.1)
    return done


def is_running(pid: int) -> bool:
    "Whether there is such a process, and not only what is left of it."
    stat = Path(f'/proc/{pid}/stat')
    try: return stat.read_text().rpartition(') ')[2][0] != 'Z'
    except (FileNotFoundError, ProcessLookupError): return False


def test_every_shipped_line_round_trips_with_constant_prompts():
    for sample in shipped('heldout') + shipped('train')[::20]:
        assert TOKENIZER.decode(TOKENIZER.encode(sample.line).ids) == sample.line
        assert len(TOKENIZER.encode(sample.prompt).ids) == PROMPT_TOKENS[sample.task]


@settings(max_examples=300)
@given(st.text(st.characters(max_codepoint=127, exclude_characters='\0'), max_size=120))
@example('B: e2e4<|endoftext|>\nP: ')
def test_any_ascii_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize('fen', FENS[::6])
def test_illegal_moves_are_illegal(fen):
    rng = random.Random(0)
    assert not {illegal_move(chess.Board(fen), rng) for _ in range(40)} & legal_moves(fen)


def why_illegal(board, move):
    "The ways in which a move is illegal, told apart without the generator's own means."
    piece, way = board.piece_at(move.from_square), set()
    if piece is None: return {'nobody'}
    if piece.color != board.turn: return {'opponent'}
    alone = chess.Board(None)
    alone.set_piece_at(move.from_square, piece)
    alone.turn = piece.color
    between = chess.SquareSet.between(move.from_square, move.to_square) & board.occupied
    target = board.piece_at(move.to_square)
    if move in board.pseudo_legal_moves: way.add('king' if piece.piece_type == chess.KING else 'exposed')
    elif move.to_square not in alone.attacks(move.from_square): way.add('reach')
    elif between: way.add('blocked')
    elif target is None or target.color == board.turn: way.add('target')
    return way


@pytest.mark.parametrize('kind', ILLEGAL_SHARES)
def test_a_move_is_illegal_in_the_way_that_was_asked_for(kind, monkeypatch):
    "A draw of any square may hit any way, and a target may be out of bounds for the king or a pinned piece."
    monkeypatch.setattr('rookworld_nb.pretrain.ILLEGAL_SHARES', {kind: 1.})
    rng, may_be = random.Random(0), {'reach': set(ILLEGAL_SHARES), 'target': {'target', 'king', 'exposed'}}
    having = [board for board in EXPOSED if kind not in ('king', 'exposed') or any(
        why_illegal(board, move) == {kind} for move in board.pseudo_legal_moves if not board.is_legal(move))]
    found = [why_illegal(board, chess.Move.from_uci(illegal_move(board, rng))) for board in having for _ in range(10)]
    assert all(way and way <= may_be.get(kind, {kind}) for way in found)
    assert sum(kind in way for way in found) > len(found)/2


def test_every_way_to_be_illegal_is_drawn():
    rng = random.Random(0)
    moves = [(board, chess.Move.from_uci(illegal_move(board, rng))) for board in EXPOSED for _ in range(20)]
    assert not any(board.is_legal(move) for board, move in moves)
    shares = {kind: sum(kind in why_illegal(*pair) for pair in moves)/len(moves) for kind in ILLEGAL_SHARES}
    assert min(shares.values()) > .03, shares


@pytest.mark.parametrize('kind', sorted(ENV_SHARES))
def test_find_kind_finds_that_kind(kind):
    sample = find_kind(kind, FENS, random.Random(1))
    asked, answer = parse_env(sample.line), parse_env(sample.completion)
    truth = env_step(asked.fen, asked.uci, asked.history)
    assert (truth.new_fen, truth.reward, truth.terminated, truth.truncated) == (
        answer.new_fen, answer.reward, answer.terminated, answer.truncated)
    if kind == 'illegal':
        assert truth.truncated
        ways = [why_illegal(chess.Board(line.fen), chess.Move.from_uci(line.uci)) for line in
                (parse_env(find_kind(kind, FENS, random.Random(seed)).line) for seed in range(400))]
        assert all(sum(way in found for found in ways)/400 > .5*share for way, share in ILLEGAL_SHARES.items())
    else:
        assert move_kind(chess.Board(asked.fen), chess.Move.from_uci(asked.uci)) == kind


def test_what_the_positions_do_not_hold_is_given_up_and_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr('rookworld_nb.pretrain.MOST_LOOKS', 200)
    endgames = [sample for sample in shipped('train') if sample.task == 'P' and sample.fen.split()[2] == '-'][:16]
    assert find_kind('castling', [sample.fen for sample in endgames], random.Random(0)) is None
    files = [tmp_path/f'{number}.txt' for number in range(16)]
    for file, sample in zip(files, endgames): write_lines([sample], file)
    rare = make_stress(files, per_kind=2)
    assert '0 of 2 castling' in caplog.text and len(rare) == len({sample.line for sample in rare}) > 6


def test_ranked_rows_say_the_same_with_the_best_move_first():
    for sample in [sample for sample in shipped('train') if sample.task == 'P'][:300]:
        told, ordered = parse_policy(sample.completion), parse_policy(ranked(sample))
        assert dict(zip(told.moves, told.evals)) == dict(zip(ordered.moves, ordered.evals)) and told.best == ordered.best == ordered.moves[0]
        assert list(ordered.evals) == sorted(told.evals, reverse=True) and ordered.clean


def test_bfloat16_learns_from_nearly_the_same_loss():
    torch.manual_seed(0)
    model, ids = GPT(GPTConfig(2, 2, 64, TOKENIZER.get_vocab_size(), 256)), rows_of('P').pad(np.arange(8))
    (exact, _), (rough, _) = (completion_loss(model, ids, PROMPT_TOKENS['P'], bf16) for bf16 in (False, True))
    assert 0 < (exact - rough).abs().max() < .05 and rough.dtype == torch.float32


def verdict_row(fen):
    return verdicts(fen, random.Random(fen))


def test_verdicts_are_those_of_the_rules():
    said = ''
    for fen in FENS:
        prompt, completion = verdict_row(fen)
        position = prompt.removeprefix('A: ').removesuffix('+')
        judged = re.findall(r'([a-h][1-8][a-h][1-8][qrbn]?)(.)', completion)
        assert len(judged) == len({uci for uci, _ in judged}) == 24 and ''.join(map(''.join, judged)) == completion
        for uci, word in judged:
            step = env_step(position, uci, [uci])
            check = not step.truncated and chess.Board(step.new_fen).is_check()
            assert word == ('?' if step.truncated else '.!'[check] if not step.terminated else '#' if step.reward == 1 else '=')
        said += ''.join(word for _, word in judged)
    assert .5 < said.count('?')/len(said) < .7 and set(said) >= set('?.!#')


@pytest.mark.parametrize(('fen', 'uci', 'word'), [
    ('k7/8/1K6/8/8/8/8/7R w - - 0 1', 'h1h8', '#'), ('k7/8/1K6/8/8/8/8/7R w - - 0 1', 'h1a1', '!'), ('k7/8/1K6/8/8/8/8/7R w - - 0 1', 'h1b1', '.'),
    ('k7/8/2K5/8/8/8/8/7Q w - - 0 1', 'c6c7', '!'), ('7k/8/5KQ1/8/8/8/8/8 w - - 0 1', 'f6f7', '='), ('k7/8/1K6/8/8/8/8/7R w - - 0 1', 'b6a7', '?'),
    ('7k/P7/8/8/8/8/8/K7 w - - 0 1', 'a7a8q', '!')])
def test_a_verdict(fen, uci, word):
    board = chess.Board(fen)
    assert verdict(board, chess.Move.from_uci(uci)) == word and board.fen() == fen


@pytest.mark.parametrize(('fen', 'exposed'), [
    ('4r2k/8/8/8/8/8/4R3/4K3 w - - 0 1', True), ('4r2k/8/8/8/8/8/4P3/4K3 w - - 0 1', False), ('4r2k/8/8/8/8/8/3R4/4K3 w - - 0 1', True),
    ('3r3k/8/8/8/8/8/4R3/4K3 w - - 0 1', False)])    # pinned; pinned but it has no other way to go; in check; only the king is held
def test_a_position_exposes_its_king(fen, exposed):
    assert exposes_king(fen) == exposed


def test_only_the_verdicts_of_a_row_are_learned():
    rows = pack('V', [verdict_row(fen) for fen in FENS[:9]], TOKENIZER)
    ids = rows.pad(np.arange(9))
    weights = token_weights('V', ids, completion_mask(ids, PROMPT_TOKENS['V'], 0), TOKENIZER)
    learned = TOKENIZER.decode(ids[:, PROMPT_TOKENS['V']:][weights > 0].tolist())
    assert len(rows) == 9 and len(learned) == 9*24 and set(learned) <= set('?.!#=') and set(weights.unique().tolist()) == {0., 1.}


def test_weights_stress_what_changes():
    sample = env_sample(chess.STARTING_FEN, 'e2e4')
    rows = pack('A', [(sample.prompt, sample.completion)], TOKENIZER)
    ids = rows.pad(np.arange(1))
    weights = token_weights('A', ids, completion_mask(ids, 84, 0), TOKENIZER)[0]
    assert weights[:71].nonzero().numel() == 71 and (weights[:71] == 5).sum() == 2     # e2 and e4 and nothing else
    assert (weights[:71] == 5).nonzero()[:, 0].tolist() == [9*4 + 4, 9*6 + 4]            # rank 4 above rank 2
    assert TOKENIZER.decode(ids[0, 84 + 77:84 + 79].tolist()) == '0.00' and (weights[77:79] == 5).all()


def test_evaluations_weigh_less():
    rows = rows_of('P', 1)
    ids = rows.pad(np.arange(1))
    weights = token_weights('P', ids, completion_mask(ids, 77, 0), TOKENIZER)[0]
    light = [TOKENIZER.id_to_token(i) for i, w in zip(ids[0, 77:].tolist(), weights.tolist()) if w == pytest.approx(.3)]
    assert light[0] == ' E:' and ' B:' not in light and all(token.strip(' -.').isdigit() for token in light[1:])


@settings(max_examples=30)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=60), st.integers(40, 200), st.integers(0, 5))
def test_batches_deal_every_row_once_an_epoch(lengths, tokens, seed):
    rows = Rows('P', np.zeros(sum(lengths), np.int16), np.cumsum([0] + lengths))
    stream, seen = batches(rows, tokens, seed), []
    while len(seen) < len(lengths):
        batch = next(stream)
        assert len(batch)*max(lengths[i] for i in batch) <= max(tokens, max(lengths))
        seen += batch.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_batches_resume_anywhere():
    rows = Rows('P', np.zeros(100*7, np.int16), np.arange(0, 701, 7))
    whole = batches(rows, 70, 3)
    expected = [next(whole).tolist() for _ in range(35)]
    for start in (1, 9, 10, 24):
        resumed = batches(rows, 70, 3, start)
        assert [next(resumed).tolist() for _ in range(35 - start)] == expected[start:]


def test_completion_loss_is_the_full_forward_loss():
    torch.manual_seed(0)
    model, rows = GPT(GPTConfig(2, 2, 32, TOKENIZER.get_vocab_size(), 256)), rows_of('P', 4)
    ids = rows.pad(np.arange(4))
    logits = model(ids)[:, 76:-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 77:], reduction='none')
    torch.testing.assert_close(completion_loss(model, ids, 77)[0], expected, atol=1e-5, rtol=1e-5)


def small_run(folder, **changes):
    config = PretrainConfig(output_dir=str(folder), steps=6, n_layer=1, n_head=2, n_embd=16, batch_tokens=400, save_every=3, threads=1)
    rows = {'P': rows_of('P'), 'A': rows_of('A')} | {'V': pack('V', [verdict_row(fen) for fen in FENS[:12]], TOKENIZER)}
    return train(replace(config, **changes), rows, TOKENIZER, {kind: part.first(4) for kind, part in rows.items()})


def test_a_killed_run_goes_on_bit_equal(tmp_path):
    (tmp_path/'whole').mkdir(), (tmp_path/'killed').mkdir()
    whole = [row['grad_norm'] for row in small_run(tmp_path/'whole')]
    first = small_run(tmp_path/'killed')
    for _ in range(5):                                  # dies after step 5: the checkpoint is of step 3
        next(first)
    first.close()
    rest = list(small_run(tmp_path/'killed'))
    assert [row['step'] for row in rest] == [4, 5, 6] and [row['grad_norm'] for row in rest] == whole[3:]
    final = [torch.load(tmp_path/name/'checkpoint.pt', weights_only=True)['model'] for name in ('whole', 'killed')]
    assert all(torch.equal(a, b) for a, b in zip(final[0].values(), final[1].values()))


def test_a_gradient_that_is_no_number_reaches_no_checkpoint(tmp_path):
    with pytest.raises(PretrainError, match='the gradient is not finite.*less than --lr 1e.30'):
        list(small_run(tmp_path, lr=1e30, warmup_steps=1, save_every=1))
    saved = torch.load(tmp_path/'checkpoint.pt', weights_only=True)['model']
    assert all(weight.isfinite().all() for weight in saved.values())


def test_a_killed_maker_of_data_ends_the_command(tmp_path):
    with pytest.raises(PretrainError, match='was killed.*the same command goes on'):
        pretrain_module._make_shards([tmp_path/'a', tmp_path/'b'], os._exit, 1)


def test_no_maker_of_data_outlives_its_command(tmp_path):
    (tmp_path/'command.py').write_text(dedent("""
        import os, time
        from pathlib import Path
        from rookworld_nb.pretrain import _make_shards

        def make(number):
            Path(f'{number}.pid').write_text(str(os.getpid()))
            time.sleep(600)

        if __name__ == '__main__': _make_shards([Path('a'), Path('b')], make, 2)
        """))
    with subprocess.Popen([sys.executable, 'command.py'], cwd=tmp_path) as command:
        pids = [tmp_path/'0.pid', tmp_path/'1.pid']
        assert soon(lambda: all(path.exists() and path.read_text() for path in pids))
        command.kill()
    assert soon(lambda: not any(is_running(int(path.read_text())) for path in pids))


def test_a_full_disk_leaves_the_checkpoint_before_and_is_said(tmp_path):
    run = small_run(tmp_path, save_every=1)
    next(run)
    before = (tmp_path/'checkpoint.pt').read_bytes()
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before)*2//3, usual[1]))    # room for the model alone
        with pytest.raises(PretrainError, match='step 2: .*checkpoint.pt cannot be written: .*File too large.*goes on'): next(run)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert (tmp_path/'checkpoint.pt').read_bytes() == before and [row['step'] for row in small_run(tmp_path, save_every=1)][0] == 2


def test_one_process_works_in_a_folder(tmp_path):
    with locked(tmp_path/'.lock'), pytest.raises(PretrainError, match='another process'):
        pretrain(PretrainConfig(output_dir=str(tmp_path)))
    assert PretrainConfig(output_dir='~/here').output_dir == os.path.expanduser('~/here')


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    list(small_run(tmp_path))
    with pytest.raises(PretrainError, match='holds a run with --lr .*, not 0.0001; give the same'):
        next(small_run(tmp_path, lr=1e-4))


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path):
    list(small_run(tmp_path))
    state = torch.load(tmp_path/'checkpoint.pt', weights_only=True)
    del state['probes']
    torch.save(state, tmp_path/'checkpoint.pt')
    with pytest.raises(PretrainError, match='a run of an older version; give another --output-dir'): next(small_run(tmp_path))


def gradients(step, steps=10):
    "Those of the first weights of a model at some step, and of its probes."
    config = PretrainConfig(steps=steps, n_layer=2, n_head=2, n_embd=16, batch_tokens=400, threads=1)
    learner = pretrain_module._Learner(config, {'A': rows_of('A', 8)}, TOKENIZER)
    learner.step = step
    loss, figures = pretrain_module._losses(learner, 'A', rows_of('A', 8).pad(np.arange(8)))
    loss.backward()
    return learner.model.h[0].attn.c_attn.weight.grad, learner.probes.board[1].weight.grad, figures


def test_probes_teach_the_model_less_and_less(monkeypatch):
    (early, asked, figures), (late, *_), (end, silent, _) = gradients(0), gradients(5), gradients(10)
    assert {'A/probes/board 1', 'A/probes/board 84', 'A/probes/start', 'A/probes/king', 'A/probes/knights'} <= set(figures)
    assert asked.abs().max() > 0 and silent.abs().max() == 0
    torch.testing.assert_close(early - late, late - end, atol=1e-6, rtol=1e-3)
    monkeypatch.setattr(pretrain_module, 'PROBE_WEIGHT', 0.)
    torch.testing.assert_close(gradients(0)[0], end)
    assert (early - end).abs().max() > 1e-4


def test_probes_ask_the_middle_block_and_the_king_one_later(monkeypatch):
    monkeypatch.setattr(pretrain_module, 'PROBE_WEIGHT', 1.)
    config = PretrainConfig(n_layer=6, n_head=2, n_embd=16, batch_tokens=400, threads=1)
    learner, rows = pretrain_module._Learner(config, {'A': rows_of('A', 8)}, TOKENIZER), rows_of('A', 8).pad(np.arange(8))
    monkeypatch.setattr(pretrain_module, 'completion_loss', lambda *args: [part.detach() for part in completion_loss(*args)])
    for silent, asked in (('king', 3), ('board', 4), (None, 4)):
        learner.model.zero_grad()
        weights = [*learner.probes.parameters()]
        if silent == 'king':    # what the readers of the king say depends on nothing
            with torch.no_grad(): learner.probes.king[1].weight.zero_()
        pretrain_module._losses(learner, 'A', rows)[0].backward()
        touched = [any(p.grad is not None and p.grad.abs().max() > 0 for p in block.parameters()) for block in learner.model.h]
        assert weights and touched == [place < asked for place in range(6)]
        if silent == 'king': torch.nn.init.normal_(learner.probes.king[1].weight)


def test_probes_are_not_shipped(tmp_path):
    list(small_run(tmp_path))
    assert load_pretrained(str(tmp_path/'model'))[0].state_dict().keys() == GPT(GPTConfig(1, 2, 16, TOKENIZER.get_vocab_size(), 256)).state_dict().keys()


def test_a_run_may_go_on_longer_and_with_another_mix(tmp_path):
    list(small_run(tmp_path))
    rest = list(small_run(tmp_path, steps=12, env_share=.99, verdict_share=0.))
    assert [row['step'] for row in rest] == [*range(7, 13)]
    assert sum('A/loss' in row for row in rest) >= 3


def test_a_run_starts_from_the_model_it_is_given(tmp_path):
    (tmp_path/'first').mkdir(), (tmp_path/'second').mkdir()
    last = list(small_run(tmp_path/'first'))[-1]
    folder = str(tmp_path/'first'/'model')
    shape = {'n_layer': 1, 'n_head': 2, 'n_embd': 16}
    model, random_one = (first_model(PretrainConfig(**shape, model=name), TOKENIZER) for name in (folder, None))
    trained = torch.load(tmp_path/'first'/'checkpoint.pt', weights_only=True)['model']
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), trained.values()))
    assert not torch.equal(model.wte.weight, random_one.wte.weight)
    later = next(small_run(tmp_path/'second', model=folder, save_every=1, lr=1e-9))
    assert later['heldout/P/loss'] == pytest.approx(last['heldout/P/loss'], rel=1e-5)


@pytest.mark.parametrize(('changes', 'words'), [
    ({'n_layer': 3}, r'--model nano is a .*n_layer=6.* and this run trains a .*n_layer=3'),
    ({'model': 'nowhere'}, 'nowhere')])
def test_a_model_to_start_from_is_refused_before_any_data_is_made(tmp_path, monkeypatch, changes, words):
    monkeypatch.setattr('rookworld_nb.pretrain.prepare', lambda *_: pytest.fail('data were made'))
    with pytest.raises(ValueError, match=words):
        pretrain(PretrainConfig(**{'output_dir': str(tmp_path), 'model': 'nano'} | changes))


def test_a_run_that_cannot_be_gone_on_with_is_refused_before_any_data_is_made(tmp_path, monkeypatch):
    list(small_run(tmp_path))
    monkeypatch.setattr('rookworld_nb.pretrain.prepare', lambda *_: pytest.fail('data were made'))
    shape = {'steps': 6, 'n_layer': 1, 'n_head': 2, 'n_embd': 16, 'batch_tokens': 400}
    (tmp_path/'trained').mkdir()
    (tmp_path/'trained'/'config.json').write_text('{}')
    with pytest.raises(PretrainError, match='holds a run of'): pretrain(PretrainConfig(output_dir=str(tmp_path/'trained')))
    with pytest.raises(PretrainError, match='a run with --shards 200, not 4'): pretrain(PretrainConfig(output_dir=str(tmp_path), shards=4, **shape))
    with pytest.raises(PretrainError, match='--steps 2: the run in .* has done 6'): pretrain(PretrainConfig(output_dir=str(tmp_path), **shape | {'steps': 2}))


@pytest.mark.parametrize('seed', [-1, 2**32])
def test_a_seed_that_numpy_does_not_take_is_refused(seed):
    with pytest.raises(PretrainError, match=f'--seed {seed}'): PretrainConfig(seed=seed)


def test_the_log_of_a_killed_run_holds_each_step_once_and_says_how_long_the_rest_takes(tmp_path, monkeypatch, caplog):
    caplog.set_level('INFO')
    clock = [0.]
    monkeypatch.setattr('rookworld_nb.positions.time', SimpleNamespace(monotonic=lambda: clock[0]))
    rows = {'P': rows_of('P'), 'A': rows_of('A')} | {'V': pack('V', [verdict_row(fen) for fen in FENS[:12]], TOKENIZER)}
    monkeypatch.setattr(pretrain_module, 'prepare', lambda *_: (rows, {kind: part.first(4) for kind, part in rows.items()}))
    monkeypatch.setattr(pretrain_module, 'whole_shard', lambda path: [])
    monkeypatch.setattr(pretrain_module, 'make_prompts', lambda *_: ([], []))
    config = PretrainConfig(output_dir=str(tmp_path), steps=9, n_layer=1, n_head=2, n_embd=16, batch_tokens=400, save_every=3, threads=1)
    step, dies_at = pretrain_module._train_step, [5]

    def dying(learner, streams):
        if learner.step in dies_at: raise KeyboardInterrupt
        clock[0] += 120.
        return step(learner, streams)
    monkeypatch.setattr(pretrain_module, '_train_step', dying)
    with pytest.raises(KeyboardInterrupt): pretrain(config)
    dies_at.clear()
    with open(tmp_path/'metrics.jsonl', 'a') as log: log.write('{"step": 6, "cut o')
    pretrain(config)
    assert [json.loads(line)['step'] for line in (tmp_path/'metrics.jsonl').read_text().splitlines()] == [*range(1, 10)]
    said = [record.getMessage().partition(':')[0] for record in caplog.records]
    assert said == ['step 3 of 9, 12 minutes to go', 'step 6 of 9, 6 minutes to go', 'step 9 of 9, 0 minutes to go']


def test_prompts_show_no_position_of_the_evaluation(tmp_path, monkeypatch):
    class Engine:
        def __init__(self, nodes=0): self.nodes = nodes
        def __enter__(self): return self
        def __exit__(self, *_): pass
        def analyse(self, fen): return tuple(Candidate(uci, self.nodes/10_000) for uci in sorted(legal_moves(fen))[:5])
    monkeypatch.setattr('rookworld_nb.pretrain.Stockfish', Engine)
    rng, start = random.Random(0), chess.Board()
    after = []
    for move in start.legal_moves:
        start.push(move)
        after.append(start.fen())
        start.pop()
    (tmp_path/'prompts').mkdir()
    policy = {False: [chess.STARTING_FEN], True: after[:-1]}
    env = {False: [env_sample(chess.STARTING_FEN, move.uci()) for move in start.legal_moves], True: [env_sample(after[0], 'a7a6')]}
    for number in range(HELD_SHARDS):
        held = number >= HELD_SHARDS - 2
        write_lines([policy_sample(fen, Engine().analyse(fen), rng) for fen in policy[held]], tmp_path/'prompts'/f'policy-{number:04d}.txt')
        write_lines(env[held], tmp_path/'prompts'/f'env-{number:04d}.txt')
    rare = [env_sample(after[-1], 'a7a6')]
    train, held = make_prompts(tmp_path, rare)
    shown = seen_positions(held + rare)
    assert train and held and shown & {fen_key(fen) for fen in after} and not seen_positions(train) & shown
    labels = [parse_policy(sample.completion) for sample in train + held if sample.task == 'P']
    assert len(labels) > 10 and all(set(label.evals) == {1.} for label in labels)    # made anew; those of the shards are 0


def test_rare_outcomes_come_in_equal_numbers():
    line = lambda number, end: Sample(f'A: {chess.STARTING_FEN[:-1]}{number}+e2e4+e2e4+', f'{chess.STARTING_FEN}+{end}')
    ends = ['0.001+0+0']*60 + ['1.0+1+0']*20 + ['0.5+1+0']*9 + ['-1.0+0+1']*3
    mix = [line(number, end) for number, end in enumerate(ends, 1)]
    random.Random(0).shuffle(mix)
    for count, expected in ((50, (5, 5, 3, 37)), (10, (1, 1, 1, 7)), (200, (20, 9, 3, 60)), (0, (0, 0, 0, 0))):
        chosen = with_rare_outcomes(mix, count)
        names = [outcome(parse_env(sample.completion)) for sample in chosen]
        assert tuple(map(names.count, ('mate', 'draw', 'illegal', 'ordinary'))) == expected
        for name in set(names):    # the first of each, in their order
            ours = [sample for sample in chosen if outcome(parse_env(sample.completion)) == name]
            assert ours == [sample for sample in mix if outcome(parse_env(sample.completion)) == name][:len(ours)]


def test_the_shipped_prompts_have_as_many_draws_as_mates_and_illegal_moves():
    names = [outcome(parse_env(sample.completion)) for sample in by_task(shipped('train'))['A'][-1800:]]
    assert names.count('mate') == names.count('draw') == names.count('illegal') == 180 and 'unreadable' not in names


def test_a_model_with_other_words_is_refused(tmp_path):
    list(small_run(tmp_path))
    path = tmp_path/'model'/'tokenizer.json'
    words = json.loads(path.read_text())
    vocabulary = words['model']['vocab']
    vocabulary['e4'], vocabulary['e5'] = vocabulary['e5'], vocabulary['e4']
    path.write_text(json.dumps(words))
    with pytest.raises(PretrainError, match='other words'):
        first_model(PretrainConfig(n_layer=1, n_head=2, n_embd=16, model=str(tmp_path/'model')), TOKENIZER)


def test_what_is_excluded_is_read_line_by_line(tmp_path):
    file = tmp_path/'fens.txt'
    file.write_text('\nrnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1\n\n')
    assert read_excluded(str(file)) == ['rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq -'] and read_excluded(None) == []
    file.write_text('rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1\ne4\n')
    with pytest.raises(PretrainError, match='fens.txt, line 2'): read_excluded(str(file))


@pytest.mark.parametrize('line', ['this is no position', '{"fen": "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"}',
                                  'P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1 M: e2e4 E: 0.3 B: e2e4',
                                  'rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP w KQkq - 0 1'])
def test_what_is_no_position_excludes_nothing_and_is_refused(tmp_path, line):
    file = tmp_path/'fens.txt'
    file.write_text(chess.STARTING_FEN + '\n' + line + '\n')
    with pytest.raises(PretrainError, match='fens.txt, line 2: not a FEN'): read_excluded(str(file))


@pytest.mark.parametrize('line', ['\ufeffrnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1', 'rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq -',
                                  'rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - bm e4; id "first";'])
def test_positions_are_excluded_however_they_are_written(tmp_path, line):
    (tmp_path/'fens.txt').write_text(line, encoding='utf-8')
    assert read_excluded(str(tmp_path/'fens.txt')) == ['rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq -']


def test_no_shipped_position_is_learned_from(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain_module, 'make_stress', partial(make_stress, per_kind=3))
    rng, tokenizer = random.Random(0), board_tokenizer()
    puzzles = [chess.Board(puzzle.questions[0].fen) for name in PUZZLES for puzzle in shipped_puzzles(name)[:2]]
    boards = {part: [random_play(rng, rng.randint(8, 30)) for _ in range(n)] for part, n in (('data', 30), ('prompts', 12))}
    boards['data'] += puzzles + [boards['prompts'][0], chess.Board(shipped('train')[0].fen)]
    for part, shards in (('data', 1), ('prompts', HELD_SHARDS)):
        (tmp_path/part).mkdir()
        lines = []
        for board in boards[part]:
            moves = [Candidate(move.uci(), 0.) for move in list(board.legal_moves)[:2]]
            lines.append(policy_sample(board.fen(), moves, rng))
        for number in range(shards): write_lines(lines, tmp_path/part/f'policy-{number:04d}.txt')
    config = PretrainConfig(output_dir=str(tmp_path), shards=1, policy_shard=20, env_shard=4, processes=1)
    learned, _ = prepare(config, tokenizer)
    texts = [tokenizer.decode(learned['P'].ids[a:b].tolist()) for a, b in zip(learned['P'].offsets, learned['P'].offsets[1:])]
    shown = {fen_key(' '.join(text[3:].split()[:6])) for text in texts}
    left_out = {fen_key(board.fen()) for board in boards['data'][30:]}
    assert shown and not shown & left_out and shown == {fen_key(board.fen()) for board in boards['data'][:30]} - left_out


def test_near_misses_of_en_passant_are_dealt_out():
    rng, fens, found = random.Random(0), [sample.fen for sample in shipped('train') if sample.task == 'P'], dict.fromkeys(('declined', 'one', 'two'), 0)
    for _ in range(1000):
        answer = parse_env(pretrain_module._ordinary(rng.choice(fens), rng).line)
        board, move = chess.Board(answer.fen), chess.Move.from_uci(answer.uci)
        assert not board.is_en_passant(move)
        steps = abs(move.to_square - move.from_square)//8 if board.piece_type_at(move.from_square) == chess.PAWN else 0
        beside = [s for s in board.pieces(chess.PAWN, not board.turn) if chess.square_rank(s) == (3 if board.turn else 4)
                  and abs(chess.square_file(s) - chess.square_file(move.to_square)) == 1]
        found['declined'] += board.ep_square is not None
        if steps and beside and not board.is_capture(move): found['one' if steps == 1 else 'two'] += 1
    assert min(found.values()) >= 8, found


def test_no_taken_position_is_judged(monkeypatch):
    corner = chess.Board('7k/8/6K1/8/8/8/8/R7 w - - 0 1')    # set up, and so in no sample
    monkeypatch.setattr(pretrain_module, 'cornered_king', lambda rng: corner.copy())
    policy = [sample for sample in shipped('train') if sample.task == 'P'][:300]
    judged = lambda taken: {prompt for prompt, _ in pretrain_module._pairs(policy, True, taken)['V']}
    assert f'A: {corner.fen()}+' in judged(set())
    assert judged({fen_key(corner.fen())}) == judged(set()) - {f'A: {corner.fen()}+'}


def test_no_rows_are_no_batches():
    with pytest.raises(PretrainError, match='no A: row is left'): next(batches(Rows('A', np.zeros(0, np.int16), np.zeros(1, np.int64)), 100, 0))


def test_env_shards_are_reproducible_and_kept(tmp_path, caplog):
    caplog.set_level('INFO')
    policy = [sample for sample in shipped('train') if sample.task == 'P'][:50]
    for folder in (tmp_path/'a', tmp_path/'b'):
        folder.mkdir()
        write_lines(policy, folder/'policy-0000.txt')
        make_env_data(folder, 1, size=30, seed=3, processes=1)
    made = (tmp_path/'a'/'env-0000.txt').read_bytes()
    assert made == (tmp_path/'b'/'env-0000.txt').read_bytes() and len(read_lines(tmp_path/'a'/'env-0000.txt')[0]) > 25
    assert [text for text in caplog.messages if 'to go' in text] == [f'{name}: 1 of 1, 0 minutes to go' for name in 'ab']
    (tmp_path/'a'/'env-0000.txt').write_text('kept')
    make_env_data(tmp_path/'a', 1, size=30, seed=3, processes=1)
    assert (tmp_path/'a'/'env-0000.txt').read_text() == 'kept'


def test_shards_of_other_settings_are_refused(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr('rookworld_nb.pretrain.Stockfish', lambda nodes: nullcontext(SimpleNamespace(name='Stockfish 2')))
    policy = [sample for sample in shipped('train') if sample.task == 'P'][:20]
    write_lines(policy, tmp_path/'policy-0000.txt')     # made before settings were kept
    make = lambda **changes: make_policy_data(tmp_path, **{'n_shards': 1, 'size': 20, 'nodes': 50, 'processes': 1} | changes)
    assert make() == [tmp_path/'policy-0000.txt'] and "'nodes': 50" in caplog.text
    caplog.clear()
    make(processes=2)
    assert not caplog.records
    for change, words in (({'nodes': 60}, '--nodes 50, not 60'), ({'size': 21}, '--policy-shard 20, not 21'),
                          ({'seed': 1}, '--seed 0, not 1'), ({'mate_share': .1}, '--mate-share 0.0, not 0.1')):
        with pytest.raises(PretrainError, match=words):
            make(n_shards=2, **change)
    notes = json.loads((tmp_path/'policy.json').read_text())
    (tmp_path/'policy.json').write_text(json.dumps(notes | {'engine': 'Stockfish 1'}))
    assert make() == [tmp_path/'policy-0000.txt']    # nothing is left to ask an engine
    with pytest.raises(PretrainError, match='engine Stockfish 1, not Stockfish 2'): make(n_shards=2)
    (tmp_path/'policy.json').write_text(json.dumps({name: value for name, value in notes.items() if name != 'mate_share'}))
    with pytest.raises(PretrainError, match='--mate-share None, not 0.0'): make()    # who wrote it did not know of it
    make_env_data(tmp_path, 1, size=5, seed=3, processes=1)
    with pytest.raises(PretrainError, match='--env-shard 5, not 6'):
        make_env_data(tmp_path, 2, size=6, seed=3, processes=1)
    assert not (tmp_path/'policy-0001.txt').exists() and not (tmp_path/'env-0001.txt').exists()


@pytest.mark.parametrize(('name', 'value'), [*((name, 0) for name in ('steps', 'shards', 'nodes', 'n_embd', 'threads', 'warmup_steps', 'decay_share')),
                                             ('steps', 10.5), ('env_share', math.nan), ('verdict_share', math.nan), ('verdict_share', -.1)])
def test_bad_settings_name_their_flag(name, value):
    with pytest.raises(PretrainError, match='--' + name.replace('_', '-')):
        PretrainConfig(**{name: value})


def test_a_damaged_shard_is_named(tmp_path):
    good = shipped('heldout')[0].line
    (tmp_path/'policy-0000.txt').write_text(f'{good}\n{good[:40]}\n')
    with pytest.raises(PretrainError, match='policy-0000.txt, line 2'): whole_shard(tmp_path/'policy-0000.txt')


@pytest.mark.parametrize('fen, uci', [('7k/8/8/8/3n4/2B5/8/K7 w - - 0 1', 'c3d4'), ('8/4P3/2k5/8/8/8/8/K7 w - - 0 1', 'e7e8b')])
def test_a_draw_is_a_draw_though_the_move_gives_check(fen, uci):
    step = env_step(fen, uci, [uci])
    assert step.terminated and step.reward == .5 and move_kind(chess.Board(fen), chess.Move.from_uci(uci)) == 'draw'


def test_what_cannot_be_packed_or_looked_for_is_said(caplog):
    assert len(pack('P', [('P: x', ' M: e2e4')], TOKENIZER)) == 0 and '1 of 1 rows left out' in caplog.text
    for kind, fens in (('mates', FENS), ('mate', [])):
        with pytest.raises(PretrainError, match='valid kinds'): find_kind(kind, fens, random.Random(0))
    with pytest.raises(PretrainError, match='--seed 1.5'): PretrainConfig(seed=1.5)
