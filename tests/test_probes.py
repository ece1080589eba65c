"Beside 13_probes: lines and moves against python-chess, and what the probes are asked."
import random

import chess
import pytest
import torch
from torch import nn

from rookworld_nb.corpus import verdicts
from rookworld_nb.positions import by_task, generate_positions, shipped
from rookworld_nb.pretrain import board_tokenizer
from rookworld_nb.probes import (BOARD_SQUARES, DIRECTIONS, KNIGHT_SQUARES, LINES, OUTSIDE, LETTERS, SIDE, BoardProbes, BoardText,
                                 first_on_lines, move_made, outputs_of, square_number)
from rookworld_nb.tasks import parse_env, parse_policy

TOKENIZER = board_tokenizer()
TEXT = BoardText(TOKENIZER)
FENS = [position.fen for position in generate_positions(40, seed=11)]


def numbers(board):
    "A python-chess board as the probes' numbers."
    pieces = [board.piece_at(chess.square_mirror(square)) for square in range(64)]
    return torch.tensor([[LETTERS.index(piece.symbol()) + 1 if piece else 0 for piece in pieces] + [0]])


def ids_of(text):
    return torch.tensor([TOKENIZER.encode(text).ids])


def test_squares_are_numbered_as_a_fen_writes_them():
    assert [square_number(0, 0), square_number(0, 7), square_number(7, 7)] == [0, 7, 63]
    assert {square_number(-1, 3), square_number(3, 8), square_number(8, 0), square_number(2, -1)} == {OUTSIDE}


@pytest.mark.parametrize('fen', FENS[::4])
def test_lines_are_those_of_queens_and_knights(fen):
    board = chess.Board(fen)
    piece, distance = first_on_lines(numbers(board), LINES[None])
    for square in range(64):
        here = chess.square_mirror(square)
        queen, knight = chess.Board(fen), chess.Board(None)
        queen.set_piece_at(here, chess.Piece(chess.QUEEN, True))
        seen = {OUTSIDE} | {chess.square_mirror(s) for s in queen.attacks(here)}
        for line, letter, steps in zip(LINES[square].tolist(), piece[0, square].tolist(), distance[0, square].tolist()):
            covered = line[:steps or 7]
            assert set(covered) <= seen
            assert letter == (numbers(board)[0, line[steps-1]] if steps else 0)
            seen -= {*covered} - {OUTSIDE}
        assert seen == {OUTSIDE}
        knight.set_piece_at(here, chess.Piece(chess.KNIGHT, True))
        assert {*KNIGHT_SQUARES[square].tolist()} - {OUTSIDE} == {chess.square_mirror(s) for s in knight.attacks(here)}


def test_the_first_four_directions_look_back():
    assert [all(target < square or target == OUTSIDE for square in range(64) for target in LINES[square, d].tolist())
            for d in range(len(DIRECTIONS))] == [True]*4 + [False]*4


def test_boards_of_a_text():
    for sample in by_task(shipped('heldout'))['A'][:50]:
        ids, answer = ids_of(sample.line), parse_env(sample.completion)
        assert torch.equal(TEXT.board(ids, 1), numbers(chess.Board(sample.fen)))
        assert torch.equal(TEXT.board(ids, 84), numbers(chess.Board(answer.new_fen)))
        assert (ids[0, SIDE] == TEXT.white) == chess.Board(sample.fen).turn


def moves_of(line, end):
    ids = ids_of(line)
    row, column = TEXT.moves(ids, end)
    assert not row.any()
    return [TOKENIZER.decode(ids[0, at:at+2].tolist()).strip() for at in column.tolist()]


def test_moves_of_a_text():
    assert moves_of('P: rnbqkbnr/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/RNBQKBNR w KQkq e6 0 2', 256) == []    # e6 is no move
    samples = by_task(shipped('heldout'))
    for sample in samples['P'][:50]:
        answer = parse_policy(sample.completion)
        assert moves_of(sample.line, 256) == [*answer.moves, answer.best]
    for sample in samples['A'][:50]:
        uci = parse_env(sample.line).uci
        assert moves_of(sample.line, 84) == [uci, uci]
    for fen in FENS:
        prompt, completion = verdicts(fen, random.Random(1))
        judged = completion.translate(dict.fromkeys(map(ord, '?.!#='), ' ')).split()
        assert moves_of(prompt + completion, 256) == judged


@pytest.mark.parametrize('fen', FENS[::4])
def test_a_move_made_is_that_of_the_rules_where_one_piece_moves(fen):
    board, compared = chess.Board(fen), 0
    for move in board.legal_moves:
        if board.is_castling(move) or board.is_en_passant(move) or move.promotion: continue
        start, to = (torch.tensor([chess.square_mirror(square)]) for square in (move.from_square, move.to_square))
        after, king = move_made(numbers(board), start, to, torch.tensor([board.turn]))
        board.push(move)
        assert torch.equal(after, numbers(board)) and chess.square_mirror(king.item()) == board.king(not board.turn)
        board.pop()
        compared += 1
    assert compared


def truth(samples):
    "Ids, and hidden states that say what python-chess sees: lower ones at squares and starts, upper ones at targets."
    ids = nn.utils.rnn.pad_sequence([ids_of(sample.line)[0] for sample in samples], batch_first=True)
    lower, upper = torch.zeros(*ids.shape, 8*21), torch.zeros(*ids.shape, 8*21 + 2)

    def lines(board, square, directions=8):
        told, occupied = torch.zeros(directions, 21), board.occupied
        for row, (down, right) in zip(told, DIRECTIONS):
            rank, file, steps = 7 - chess.square_rank(square) + down, chess.square_file(square) + right, 1
            while 0 <= rank < 8 and 0 <= file < 8 and not occupied & chess.BB_SQUARES[chess.square(file, 7 - rank)]:
                rank, file, steps = rank + down, file + right, steps + 1
            inside = 0 <= rank < 8 and 0 <= file < 8
            row[LETTERS.index(board.piece_at(chess.square(file, 7 - rank)).symbol()) + 1 if inside else 0] = 1
            row[13 + (steps if inside else 0)] = 1
        return told.flatten()

    for sample, low, high, row in zip(samples, lower, upper, ids):
        board = chess.Board(sample.fen)
        for place, square in enumerate(range(64)): low[1 + BOARD_SQUARES[place], :84] = lines(board, chess.square_mirror(square), 4)
        answer = parse_policy(sample.completion)
        for uci, column in zip([*answer.moves, answer.best], TEXT.moves(row[None], 256)[1].tolist(), strict=True):
            move = chess.Move.from_uci(uci)
            low[column] = lines(board, move.from_square)
            after = board.copy()
            after.remove_piece_at(move.from_square)
            after.set_piece_at(move.to_square, board.piece_at(move.from_square))
            king = after.king(board.turn)
            near = [piece.color for square in chess.SquareSet(chess.BB_KNIGHT_ATTACKS[king])
                    if (piece := after.piece_at(square)) and piece.piece_type == chess.KNIGHT]
            high[column + 1] = torch.cat([lines(after, king), torch.tensor([float(False in near), float(True in near)])])
    return ids, lower, upper


def test_probes_ask_for_what_python_chess_sees():
    "States that hold the truth, read by maps that hand on what they find: all is right, and little of it in states of another position."
    samples = [s for s in by_task(shipped('heldout'))['P'] if not any(len(uci) == 5 for uci in parse_policy(s.completion).moves)
               and not any(map(chess.Board(s.fen).is_en_passant, chess.Board(s.fen).legal_moves)) and not chess.Board(s.fen).castling_rights][:60]
    assert {chess.Board(sample.fen).turn for sample in samples} == {True, False}
    ids, lower, upper = truth(samples)
    lower = nn.functional.pad(lower, (0, 2))
    probes = BoardProbes(170, TOKENIZER, (1000, 10_000))
    with torch.no_grad():
        for asking in (probes.board, probes.start, probes.king):
            asking[1].weight.copy_(9*torch.eye(len(asking[1].weight), 170))
            asking[1].bias.zero_()
        asked, wrong = probes(ids, [1], lower, upper), probes(ids, [1], lower.roll(1, 0), upper.roll(1, 0))
    assert set(asked) == {'board 1', 'start', 'king', 'knights'}
    assert all(right == 1 and nats < .1 for nats, right in asked.values())
    assert all(right < .95 and nats > 1 for nats, right in wrong.values())


def test_few_of_a_batch_are_asked_about():
    asked = []
    for most in (1, 2, 10**6):
        probes, states = BoardProbes(4, TOKENIZER, (most, most)), torch.zeros(3, 200, 4)
        probes.board.register_forward_hook(lambda module, args, out: asked.append(len(args[0])))
        probes.start.register_forward_hook(lambda module, args, out: asked.append(len(args[0])))
        lines = [sample.line for sample in by_task(shipped('heldout'))['P'][:3]]
        ids = nn.utils.rnn.pad_sequence([ids_of(line)[0] for line in lines], batch_first=True)
        probes(ids, [1], states, states)
    assert asked == [1, 1, 2, 2, 3, sum(len(parse_policy(line).moves) + 1 for line in lines)]


def test_without_moves_only_boards_are_asked_about():
    ids, states = ids_of(f'P: {FENS[0]}'), torch.zeros(1, 77, 16)
    asked = BoardProbes(16, TOKENIZER)(ids, [1], states, states)
    assert set(asked) == {'board 1'} and asked['board 1'][0].isfinite()


def test_an_answer_has_a_board_of_its_own():
    sample = by_task(shipped('heldout'))['A'][0]
    ids, states = ids_of(sample.line), torch.zeros(1, 200, 16)
    asked = BoardProbes(16, TOKENIZER)(ids, [1, 84], states[:, :ids.shape[1]], states[:, :ids.shape[1]])
    assert set(asked) == {'board 1', 'board 84', 'start', 'king', 'knights'} and all(nats.isfinite() for nats, _ in asked.values())


def test_looking_inside_changes_nothing_and_ends():
    blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    x = torch.randn(2, 4)
    expected = blocks[1](blocks[0](x))
    with pytest.raises(ZeroDivisionError), outputs_of(blocks) as inside:
        assert torch.equal(blocks[1](blocks[0](x)), expected)
        assert torch.equal(inside[0], blocks[0](x)) and torch.equal(inside[1], expected)
        1/0    # noqa: B018
    assert not any(block._forward_hooks for block in blocks)
