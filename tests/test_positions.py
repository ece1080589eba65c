"Positions, data files and the prompt stream: what the notebook leaves out."
import gzip
import random
from dataclasses import replace
from collections import Counter
from importlib.resources import files

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookworld_nb.positions import (OPENINGS, SHIPPED, DataError, development_weight, PromptMix, Sample, by_task, with_history, generate_positions, is_rare, opening_positions, outcome, random_endgame, read_lines,
                                    seen_positions, shipped, split_by_position, spread, write_lines)
from rookworld_nb.rules import env_step, fen_key, legal_moves
from rookworld_nb.tasks import END_TEXT, TaskFormatError, format_env, format_policy, parse_env, parse_policy
from rookworld_nb.weights import END_TOKEN


def pool(n_policy, n_env):
    return ([Sample(f'P: {chess.STARTING_FEN[:-1]}{i}', '') for i in range(1, n_policy + 1)]
            + [Sample(f'A: {chess.STARTING_FEN[:-1]}{i}+e2e4+e2e4+', '') for i in range(1, n_env + 1)])


@pytest.mark.parametrize('share', [.29, .57, .58])
def test_a_hundred_prompts_hold_an_exact_share(share):
    assert sum(sample.task == 'A' for sample in PromptMix(pool(100, 100), 100, share, rare_env_ratio=None).batch(0)) == round(100*share)


@pytest.mark.parametrize('n', [1, 5, 64, 256, 500])
def test_quotas_are_exact_positions_distinct_and_legal(n):
    positions = generate_positions(n, seed=1)
    phases = [position.phase for position in positions]
    assert len(positions) == n == len({fen_key(position.fen) for position in positions})
    assert phases.count('opening') == phases.count('endgame') == round(.2*n)
    for position in positions:
        board = chess.Board(position.fen)
        assert board.is_valid() and not board.is_game_over() and board.fen() == position.fen
        assert position.phase != 'endgame' or len(board.piece_map()) < 14


def test_openings_run_out_and_middle_games_take_their_place():
    positions, named = generate_positions(700, seed=1), len(opening_positions())
    phases = [position.phase for position in positions]
    assert phases.count('opening') == named < 140 == phases.count('endgame') and phases.count('middlegame') == 560 - named
    assert len({fen_key(position.fen) for position in positions}) == 700


def test_the_seed_decides():
    assert generate_positions(50, 3) == generate_positions(50, 3) != generate_positions(50, 4)


def test_every_opening_is_playable_and_named():
    named = opening_positions()
    assert len(OPENINGS) >= 51 and all(position.name for position in named)
    assert len({fen_key(position.fen) for position in named}) == len(named)


@pytest.mark.parametrize('n', [0, -3])
def test_impossible_numbers_are_refused(n):
    with pytest.raises(DataError, match=str(n)):
        generate_positions(n)


@pytest.mark.parametrize('name', ['lines.txt', 'lines.txt.gz'])
def test_files_round_trip_and_are_reproducible(tmp_path, name):
    samples = shipped('heldout')[:20] + shipped('train')[-20:]
    for folder in (tmp_path/'a', tmp_path/'b'):
        folder.mkdir()
        write_lines(samples, folder/name)
    assert read_lines(tmp_path/'a'/name) == (samples, [])
    assert (tmp_path/'a'/name).read_bytes() == (tmp_path/'b'/name).read_bytes()
    assert not name.endswith('.gz') or (tmp_path/'a'/name).read_bytes()[4:8] == bytes(4)    # no time stamp


def test_a_missing_file_and_an_unknown_set_are_named(tmp_path):
    with pytest.raises(DataError, match='nowhere.txt'):
        read_lines(tmp_path/'nowhere.txt')
    with pytest.raises(DataError, match="'test'"):
        shipped('test')


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(exclude_characters='\r\n', codec='utf-8'), max_size=80), max_size=8))
def test_no_text_is_fatal(texts):
    samples, malformed = read_lines(texts)
    assert len(samples) + len(malformed) == sum(bool(text.strip()) for text in texts)


def test_damaged_gzip_is_an_error(tmp_path):
    path = tmp_path/'cut.txt.gz'
    path.write_bytes(gzip.compress(b'P: x\n'*1000)[:-9])
    with pytest.raises(DataError, match='cut.txt.gz'):
        read_lines(path)
    whole, said = gzip.compress(random.Random(0).randbytes(4000).hex().encode()), 0
    for at in range(20, len(whole) - 20, 50):    # one wrong byte: a bad block, or a bad sum
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1:])
        try: read_lines(path)
        except DataError: said += 1
    assert said > 10


@pytest.mark.parametrize('share', [0, 1, -.1, 2])
def test_split_share_is_checked(share):
    with pytest.raises(DataError, match='heldout_share'):
        split_by_position([], share)


def test_split_does_not_depend_on_order():
    samples = shipped('train')[:500]
    left, right = split_by_position(samples, .3, seed=2), split_by_position(samples[::-1], .3, seed=2)
    assert set(left[1]) == set(right[1]) and not {fen_key(s.fen) for s in left[0]} & {fen_key(s.fen) for s in left[1]}
    assert .2 < len(left[1])/len(samples) < .4
    assert left[1] != split_by_position(samples, .3, seed=3)[1]


@pytest.mark.slow
def test_shipped_sets_are_disjoint_by_position_and_right():
    train, heldout, stress = map(shipped, SHIPPED)
    for name in SHIPPED: assert read_lines(files('rookworld_nb')/'assets'/f'{name}.txt.gz') == (shipped(name), [])
    assert not seen_positions(train) & ({fen_key(s.fen) for s in heldout} | seen_positions(stress))
    for sample in heldout + stress + train[::25]:
        if sample.task == 'A':
            asked, answer = parse_env(sample.line), parse_env(sample.completion)
            truth = env_step(asked.fen, asked.uci, asked.history)
            assert tuple(truth) == (answer.new_fen, answer.reward, answer.terminated, answer.truncated)
        else:
            answer = parse_policy(sample.completion)
            assert answer.has_form(min(2, len(answer.moves))) and set(answer.moves) <= legal_moves(sample.fen)
            assert len(answer.moves) == min(5, len(legal_moves(sample.fen)))
            assert dict(zip(answer.moves, answer.evals))[answer.best] == max(answer.evals)


def test_rare_moves_are_shipped_in_equal_numbers():
    lines = [parse_env(sample.line) for sample in shipped('stress')]
    assert len(lines) == 700 and Counter((line.reward, line.terminated, line.truncated) for line in lines) == {
        (1., True, False): 100, (.5, True, False): 100, (-1., False, True): 100, (.001, False, False): 400}


def test_a_shipped_set_cannot_be_spoilt():
    shipped('stress').clear()
    assert len(shipped('stress')) == 700


@settings(max_examples=50)
@given(st.integers(1, 12), st.floats(0, 1), st.integers(1, 30))
def test_the_share_of_env_prompts_is_exact(size, ratio, n):
    mix = PromptMix(pool(7, 5), size, ratio)
    batches = [mix.batch(k) for k in range(n)]
    assert all(len(batch) == size for batch in batches)
    assert abs(sum(s.task == 'A' for batch in batches for s in batch) - n*size*ratio) < 1


def env_pool(usual, rare):
    "Samples of task A: ordinary moves, then mates, draws and illegal moves in turn."
    ends = ['0.001+0+0']*usual + [['1+1+0', '0.5+1+0', '-1+0+1'][i % 3] for i in range(rare)]
    return [Sample(f'A: {chess.STARTING_FEN[:-1]}{i}+e2e4+e2e4+', f'{chess.STARTING_FEN}+{end}') for i, end in enumerate(ends, 1)]


@pytest.mark.parametrize('end, name', [('1.0+1+0', 'mate'), ('0.5+1+0', 'draw'), ('-1.0+0+1', 'illegal'), ('0.001+0+0', 'ordinary'),
                                       ('x+1+0', 'unreadable'), ('0.5+x+0', 'unreadable'), ('0.5+1', 'unreadable'), ('', 'unreadable')])
def test_an_outcome_is_read_from_reward_and_flags(end, name):
    answer = f'{chess.STARTING_FEN}+{end}'
    assert outcome(parse_env(answer)) == name
    assert is_rare(Sample(f'A: {chess.STARTING_FEN}+e2e4+e2e4+', answer)) == (name in ('mate', 'draw', 'illegal'))


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.floats(0, 1), st.integers(1, 12), st.integers(1, 20))
def test_the_share_of_rare_moves_is_exact_and_each_comes_once_a_round(usual, rare, env_ratio, rare_ratio, size, n):
    mix = PromptMix(pool(5, 0) + env_pool(usual, rare), size, env_ratio, 3, rare_ratio)
    drawn = [sample for k in range(n) for sample in mix.batch(k) if sample.task == 'A']
    for kind, count, share in ((True, rare, rare_ratio), (False, usual, 1-rare_ratio)):
        mine = [sample.prompt for sample in drawn if is_rare(sample) == kind]
        assert abs(len(mine) - len(drawn)*share) < 1
        assert all(len(set(mine[start:start+count])) == len(mine[start:start+count]) for start in range(0, len(mine), count))
    plain = PromptMix(pool(5, 0) + env_pool(usual, rare), size, env_ratio, 3)
    assert [[s for s in mix.batch(k) if s.task == 'P'] for k in range(n)] == [[s for s in plain.batch(k) if s.task == 'P'] for k in range(n)]


@pytest.mark.parametrize('usual, rare', [(4, 0), (0, 4)])
def test_samples_of_one_kind_are_dealt_as_they_are(usual, rare):
    streams = [PromptMix(env_pool(usual, rare), 3, 1., 0, share) for share in (None, 0., .4, 1.)]
    assert all(stream.batch(k) == streams[0].batch(k) for stream in streams for k in range(5))


def test_every_prompt_comes_once_a_round_and_rounds_differ():
    mix = PromptMix(pool(12, 0), 4, 0.)
    rounds = [[s for _ in range(3) for s in next(mix)] for _ in range(2)]
    assert sorted(map(str, rounds[0])) == sorted(map(str, rounds[1])) and rounds[0] != rounds[1]


@pytest.mark.parametrize('arguments', [dict(batch_positions=0), dict(batch_positions=2.5), dict(mix_env_ratio=1.5), dict(mix_env_ratio=-.1), dict(rare_env_ratio=2.), dict(rare_env_ratio=-.1)])
def test_a_bad_mix_is_refused(arguments):
    with pytest.raises(DataError, match=next(iter(arguments))):
        PromptMix(pool(3, 3), **arguments)


def test_a_task_without_samples_is_refused():
    with pytest.raises(DataError, match='A: prompts'):
        PromptMix(pool(3, 0), mix_env_ratio=.2)
    assert all(s.task == 'P' for s in next(PromptMix(pool(3, 0), mix_env_ratio=0.)))


def test_what_no_policy_line_may_say():
    good = next(sample for sample in shipped('heldout') if sample.task == 'P')
    bad = good.line.replace(good.completion.split()[1], 'a1h8')
    samples, malformed = read_lines([good.line, bad, good.line + '<|endoftext|> and more'])
    assert [sample.line for sample in samples] == [good.line]*2
    assert malformed == [(2, 'the move a1h8 is not legal in the position'), (3, "a prompt starts with 'P: ' or 'A: ', not 'and more'")]
    first, second = good.completion.split()[1:3]
    twice, best = good.line.replace(f' {second}', f' {first}'), good.line.rpartition('B: ')[0] + 'B: a1h8'
    assert [reason for _, reason in read_lines([twice, best])[1]] == ['a move is listed twice', 'the move a1h8 is not legal in the position']


@pytest.mark.parametrize('pieces', [(2, 9), (9, 3), (3, 33)])
def test_an_impossible_endgame_is_refused(pieces):
    with pytest.raises(DataError, match=f'min_pieces={pieces[0]} and max_pieces={pieces[1]}'): random_endgame(random.Random(0), *pieces)


def test_a_file_that_ends_in_the_middle_is_told_apart(tmp_path):
    whole = gzip.compress('\n'.join(sample.line for sample in shipped('heldout')[:50]).encode())
    (tmp_path/'cut.gz').write_bytes(whole[:-200])
    with pytest.raises(DataError, match='cut.gz ends in the middle'): read_lines(tmp_path/'cut.gz')


def test_spread_takes_the_ends():
    assert spread(range(101)) == [0, 50, 100] and spread([7]) == [7] and spread([7, 8], 3) == [7, 8]
    assert spread('abcde', 1) == ['a'] and spread('', 3) == [] and spread(range(10), 4) == [0, 3, 6, 9]


def test_a_history_is_cut_at_its_old_end():
    long = 'A: r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3+f1b5+e2e4 e7e5 g1f3 b8c6 f1b5+'
    one, two, all_of_it = (with_history([Sample(long, 'x'), Sample('P: y', 'z')], plies) for plies in (1, 2, 5))
    assert one[0].prompt.endswith('+f1b5+f1b5+') and two[0].prompt.endswith('+f1b5+b8c6 f1b5+') and all_of_it[0].prompt == long
    assert one[1] == Sample('P: y', 'z') and one[0].completion == 'x'
    with pytest.raises(DataError, match='plies=0'): with_history([Sample(long, 'x')], 0)


def test_a_sample_knows_its_task_or_is_told():
    assert Sample('P: 3', '4').task == 'P' and Sample('3+4+5+', '').task == 'A' and Sample('3+4+5+', '', 'sum').task == 'sum'
    assert replace(Sample('write cat', '', task='letters'), completion='cat') == Sample('write cat', 'cat', 'letters') != Sample('write cat', 'cat', 'words')
    with pytest.raises(TaskFormatError, match="a prompt starts with 'P: ' or 'A: ', not 'write cat'; one of another task names it"): Sample('write cat', '')
    letters, policy = Sample('a', '', 'letters'), Sample('P: 3', '')
    assert by_task([letters, policy, letters]) == {'P': [policy], 'A': [], 'letters': [letters]*2} and by_task([]) == {'P': [], 'A': []}


@pytest.mark.parametrize(('fen', 'weights'), [
    (chess.STARTING_FEN, {'e2e4': 3, 'd2d4': 3, 'g1f3': 3, 'b1c3': 3, 'a2a3': 1, 'e2e3': 1}),
    ('rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR b KQkq - 0 1', {'e7e5': 3, 'd7d5': 3, 'g8f6': 3, 'a7a6': 1}),
    ('r1bqkbnr/pppppppp/8/8/3n4/5N2/PPPPPPPP/RNBQKB1R w KQkq - 0 1', {'f3d4': 3, 'f3e5': 3, 'f3g5': 1, 'h1g1': 1}),
    ('k7/8/8/8/8/8/6N1/K5B1 w - - 0 1', {'g1d4': 9, 'g1e3': 3, 'g2e3': 1})])
def test_the_weights_of_random_play(fen, weights):
    board = chess.Board(fen)
    assert {uci: development_weight(board, chess.Move.from_uci(uci)) for uci in weights} == weights


def test_middle_games_have_8_to_20_plies():
    plies = {(position.name, chess.Board(position.fen).ply()) for position in generate_positions(400, seed=1) if position.phase == 'middlegame'}
    assert plies == {(f'{n} plies', n) for n in range(8, 21)}


def test_a_line_may_hold_many_documents(tmp_path):
    assert END_TEXT == END_TOKEN
    lines = [sample.line for sample in shipped('heldout')[::300]]
    (tmp_path/'text.txt').write_text(END_TOKEN + END_TOKEN.join(lines[:3]) + END_TOKEN + '\r\n' + END_TOKEN.join([*lines[3:], 'nonsense']))
    samples, malformed = read_lines(tmp_path/'text.txt')
    assert [sample.line for sample in samples] == lines and [number for number, _ in malformed] == [2]


def test_a_line_is_read_in_the_spelling_that_a_model_knows():
    fen = 'rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1'    # nobody can take
    lines = [format_policy(fen, ('e7e5', 'c7c5'), (.3, .2)), format_env(fen, 'e7e5', None, *env_step(fen, 'e7e5'))]
    (policy, env), malformed = read_lines(lines)
    assert not malformed and policy.fen == env.fen == fen.replace('e3', '-') and lines[0].endswith(policy.completion) and lines[1].endswith(env.completion)


@pytest.mark.parametrize('env_ratio', [0., .3])
def test_a_curriculum_sorts_the_prompts_that_a_run_begins_with_and_no_others(env_ratio):
    samples = shipped('train')[:300] + shipped('train')[-60:]
    mixes = [PromptMix(samples, 7, env_ratio, 5, easy_first=n) for n in (4, 0)]
    easy, usual = ([sample for k in range(4) for sample in mix.batch(k)] for mix in mixes)
    counts = [len(legal_moves(sample.fen)) for sample in easy if sample.task == 'P']
    assert counts == sorted(counts) and len({*counts}) > 5
    assert {*easy} == {*usual} and easy != usual and [s for s in easy if s.task == 'A'] == [s for s in usual if s.task == 'A']
    assert [mixes[0].batch(k) for k in (9, 4)] == [mixes[1].batch(k) for k in (9, 4)] and mixes[0].stream.pool == mixes[1].stream.pool


def test_a_prompt_as_the_public_data_has_it_gets_its_prefix():
    sample = next(sample for sample in shipped('heldout') if sample.task == 'A')
    bare = Sample(sample.prompt.removeprefix('A: '), sample.completion)
    assert bare == sample and Sample(f' {bare.prompt}', '').prompt == f' {sample.prompt}' and replace(bare, completion='') == replace(sample, completion='')


def test_a_mix_says_that_it_does_not_deal_other_tasks():
    own = [Sample('write', '', task='letters')]
    for samples in (own, own + shipped('heldout')):
        with pytest.raises(DataError, match='samples of task letters: a mix deals P: and A: prompts'): PromptMix(samples, 2, 0.)


@pytest.mark.parametrize('samples, ratio, rare', [(pool(12, 0), 0., None), (pool(0, 12), 1., None), (env_pool(12, 12), 1., 1.)])
def test_the_seed_decides_the_order_of_every_kind_of_prompt(samples, ratio, rare):
    orders = [PromptMix(samples, 12, ratio, seed, rare).batch(0) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2] and {*orders[0]} == {*orders[2]}
