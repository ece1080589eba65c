"How nano is made: tokenizer, rows, weights of the loss, resumable training."
import json
import math
import os
import random
import resource
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import chess
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookworld_nb import pretrain as pretrain_module
from rookworld_nb.corpus import HELD_SHARDS, env_sample, make_stress, policy_sample, verdicts
from rookworld_nb.model import GPT, GPTConfig
from rookworld_nb.positions import PUZZLES, generate_positions, locked, random_play, shipped, write_lines
from rookworld_nb.pretrain import (PROMPT_TOKENS, Packed, PretrainConfig, PretrainError, batches, best_first_completion, board_tokenizer, completion_loss, completion_mask,
                                   first_model, kept_rows, pack, prepare, pretrain, read_excluded, token_weights, train)
from rookworld_nb.rules import Candidate, EngineNotFoundError, fen_key
from rookworld_nb.suites import shipped_puzzles
from rookworld_nb.tasks import parse_policy
from rookworld_nb.weights import load_pretrained

TOKENIZER = board_tokenizer()
FENS = [position.fen for position in generate_positions(60, seed=5)]



def verdict_row(fen):
    return verdicts(fen, random.Random(fen))


def rows_of(kind, n=40):
    samples = [sample for sample in shipped('train') if sample.task == kind][:n]
    return pack(kind, [(sample.prompt, sample.completion) for sample in samples], TOKENIZER)


def test_every_shipped_line_round_trips_with_constant_prompts():
    for sample in shipped('heldout') + shipped('train')[::20]:
        assert TOKENIZER.decode(TOKENIZER.encode(sample.line).ids) == sample.line
        assert len(TOKENIZER.encode(sample.prompt).ids) == PROMPT_TOKENS[sample.task]


@settings(max_examples=300)
@given(st.text(st.characters(max_codepoint=127, exclude_characters='\0'), max_size=120))
@example('B: e2e4<|endoftext|>\nP: ')
def test_any_ascii_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_ranked_rows_say_the_same_with_the_best_move_first():
    for sample in [sample for sample in shipped('train') if sample.task == 'P'][:300]:
        told, ordered = parse_policy(sample.completion), parse_policy(best_first_completion(sample))
        assert dict(zip(told.moves, told.evals)) == dict(zip(ordered.moves, ordered.evals)) and told.best == ordered.best == ordered.moves[0]
        assert list(ordered.evals) == sorted(told.evals, reverse=True) and ordered.clean


def test_bfloat16_learns_from_nearly_the_same_loss():
    torch.manual_seed(0)
    model, ids = GPT(GPTConfig(2, 2, 64, TOKENIZER.get_vocab_size(), 256)), rows_of('P').pad(np.arange(8))
    (exact, _), (rough, _) = (completion_loss(model, ids, PROMPT_TOKENS['P'], bf16) for bf16 in (False, True))
    assert 0 < (exact - rough).abs().max() < .05 and rough.dtype == torch.float32


def test_bfloat16_leaves_the_logits_in_float32(monkeypatch):
    model, ids = GPT(GPTConfig(1, 2, 16, 20, 12)), torch.arange(24).view(2, 12) % 20
    states = model.hidden(ids[:, :-1]).detach()
    monkeypatch.setattr(model, 'hidden', lambda ids: states)
    exact, rough = (completion_loss(model, ids, 3, bf16)[0] for bf16 in (False, True))
    assert torch.equal(exact, rough)


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
    rows = Packed('P', np.zeros(sum(lengths), np.int16), np.cumsum([0] + lengths))
    stream, seen = batches(rows, tokens, seed), []
    while len(seen) < len(lengths):
        batch = next(stream)
        assert len(batch)*max(lengths[i] for i in batch) <= max(tokens, max(lengths))
        seen += batch.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_batches_resume_anywhere():
    rows = Packed('P', np.zeros(100*7, np.int16), np.arange(0, 701, 7))
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


def test_one_process_works_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain_module, 'find_stockfish', str)
    with locked(tmp_path/'.lock'), pytest.raises(PretrainError, match='another process'):
        pretrain(PretrainConfig(output_dir=str(tmp_path)))
    assert PretrainConfig(output_dir='~/here').output_dir == os.path.expanduser('~/here')


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    list(small_run(tmp_path))
    with pytest.raises(PretrainError, match='holds a run with --lr .*, not 0.0001; give the same'):
        next(small_run(tmp_path, lr=1e-4))


def test_positions_are_excluded_by_what_they_are_and_not_by_the_file(tmp_path):
    for name, fen in (('one', chess.STARTING_FEN), ('same', chess.STARTING_FEN), ('other', chess.Board.empty().fen())):
        (tmp_path/name).write_text(fen.replace('8/8/8/8/8/8/8/8', 'k7/8/8/8/8/8/8/K7'))
    list(small_run(tmp_path, exclude=str(tmp_path/'one')))
    assert not list(small_run(tmp_path, exclude=str(tmp_path/'same')))    # it is finished
    with pytest.raises(PretrainError, match='names other positions'): next(small_run(tmp_path, exclude=str(tmp_path/'other')))


def gradients(step, steps=10):
    "Those of the first weights of a model at some step, and of its probes."
    config = PretrainConfig(steps=steps, n_layer=2, n_head=2, n_embd=16, batch_tokens=400, threads=1)
    learner = pretrain_module._Learner(config, {'A': rows_of('A', 8)}, TOKENIZER)
    learner.step = step
    loss, figures = pretrain_module._losses(learner, 'A', rows_of('A', 8).pad(np.arange(8)))
    loss.backward()
    return learner.model.h[0].attn.c_attn.weight.grad, learner.probes.board[1].weight.grad, figures


def test_only_the_places_of_a_board_get_a_code():
    model = GPT(GPTConfig(vocab_size=TOKENIZER.get_vocab_size(), n_positions=256, n_embd=8, n_layer=1, n_head=1))
    before = model.wpe.weight.detach().clone()
    pretrain_module.board_init_(model, TOKENIZER)
    changed = (model.wpe.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [*range(1, 72), *range(83, 154)]    # 64 squares and 7 slashes: of the prompt, and of the board in an answer


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
    monkeypatch.setattr('rookworld_nb.labels.time', SimpleNamespace(monotonic=lambda: clock[0]))
    rows = {'P': rows_of('P'), 'A': rows_of('A')} | {'V': pack('V', [verdict_row(fen) for fen in FENS[:12]], TOKENIZER)}
    monkeypatch.setattr(pretrain_module, 'prepare', lambda *_: (rows, {kind: part.first(4) for kind, part in rows.items()}))
    monkeypatch.setattr(pretrain_module, 'whole_shard', lambda path: [])
    monkeypatch.setattr(pretrain_module, 'make_prompts', lambda *_, **__: ([], []))
    monkeypatch.setattr(pretrain_module, 'find_stockfish', str)
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
    config = PretrainConfig(output_dir=str(tmp_path), shards=1, policy_shard=20, env_shard=4, workers=1)
    learned, _ = prepare(config, tokenizer)
    texts = [tokenizer.decode(learned['P'].ids[a:b].tolist()) for a, b in zip(learned['P'].offsets, learned['P'].offsets[1:])]
    shown = {fen_key(' '.join(text[3:].split()[:6])) for text in texts}
    left_out = {fen_key(board.fen()) for board in boards['data'][30:]}
    assert shown and not shown & left_out and shown == {fen_key(board.fen()) for board in boards['data'][:30]} - left_out


def test_no_taken_position_is_judged(monkeypatch):
    corner = chess.Board('7k/8/6K1/8/8/8/8/R7 w - - 0 1')    # set up, and so in no sample
    monkeypatch.setattr('rookworld_nb.corpus.cornered_king', lambda rng: corner.copy())
    policy = [sample for sample in shipped('train') if sample.task == 'P'][:300]
    judged = lambda taken: {prompt for prompt, _ in pretrain_module._pairs(policy, True, taken)['V']}
    assert f'A: {corner.fen()}+' in judged(set())
    assert judged({fen_key(corner.fen())}) == judged(set()) - {f'A: {corner.fen()}+'}


def test_no_rows_are_no_batches():
    with pytest.raises(PretrainError, match='no A: row is left'): next(batches(Packed('A', np.zeros(0, np.int16), np.zeros(1, np.int64)), 100, 0))


@pytest.mark.parametrize(('name', 'value'), [*((name, 0) for name in ('steps', 'shards', 'nodes', 'n_embd', 'threads', 'warmup_steps', 'decay_share')),
                                             ('steps', 10.5), ('env_share', math.nan), ('verdict_share', math.nan), ('verdict_share', -.1)])
def test_bad_settings_name_their_flag(name, value):
    with pytest.raises(PretrainError, match='--' + name.replace('_', '-')):
        PretrainConfig(**{name: value})


def test_what_cannot_be_packed_is_said(caplog):
    assert len(pack('P', [('P: x', ' M: e2e4')], TOKENIZER)) == 0 and '1 of 1 rows left out' in caplog.text
    with pytest.raises(PretrainError, match='--seed 1.5'): PretrainConfig(seed=1.5)


def test_an_engine_that_is_not_there_is_said_before_a_folder_is_made(tmp_path):
    with pytest.raises(EngineNotFoundError, match='nowhere.*--stockfish-path'):
        pretrain(PretrainConfig(output_dir=str(tmp_path/'run'), stockfish_path='nowhere'))
    assert not (tmp_path/'run').exists()


def test_a_run_goes_on_with_the_positions_that_it_left_out(tmp_path):
    file = tmp_path/'fens.txt'
    file.write_text(FENS[0])
    (tmp_path/'run').mkdir()
    assert [next(small_run(tmp_path/'run', exclude=str(file), save_every=1))['step'] for _ in range(2)] == [1, 2]
    file.write_text(FENS[1])
    with pytest.raises(PretrainError, match='--exclude .*names other positions than when the run'):
        next(small_run(tmp_path/'run', exclude=str(file), save_every=1))


def test_a_damaged_checkpoint_names_itself(tmp_path):
    list(small_run(tmp_path))
    path = tmp_path/'checkpoint.pt'
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(PretrainError, match='checkpoint.pt: damaged .*begins anew'): next(small_run(tmp_path))
    for other in ({}, [], torch.zeros(2)):
        torch.save(other, path)
        with pytest.raises(PretrainError, match='checkpoint.pt: not a checkpoint of pre-training'): next(small_run(tmp_path))


def test_damaged_rows_are_made_again(tmp_path, caplog):
    rows = {part: {kind: rows_of('P', 3) for kind in 'PAV'} for part in ('train', 'held')}
    pretrain_module._keep_rows(tmp_path/'rows.npz', 'this', rows)
    kept = kept_rows(tmp_path/'rows.npz', 'this')
    assert [len(kept[0]['A']), len(kept[1]['V'])] == [3, 3] and kept_rows(tmp_path/'rows.npz', 'that') is None
    whole = (tmp_path/'rows.npz').read_bytes()
    for damaged in (whole[:200], b'', whole[:-40]):
        (tmp_path/'rows.npz').write_bytes(damaged)
        assert kept_rows(tmp_path/'rows.npz', 'this') is None
    assert caplog.text.count('rows.npz: damaged') == 3
