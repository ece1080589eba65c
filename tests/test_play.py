"""The model as an opponent: the UCI engine against python-chess's client, the game, the board that is clicked."""
import random
import subprocess
import sys

import chess
import chess.engine
import pytest

from rookworld_nb.suites import SuiteError, model_player, model_simulator, model_world, uci_board, uci_session
from rookworld_nb.tasks import EnvAnswer, PolicyAnswer
from rookworld_nb.weights import load_pretrained


@pytest.fixture(scope='module')
def nano():
    return load_pretrained('nano')


# ---- UCI

def stubborn(*moves: str):
    "A player that always gives the same answer."
    return lambda fens: [PolicyAnswer(moves=moves, evals=(.5,)*len(moves), best=moves[0] if moves else None)]*len(fens)


def stubborn_line(moves):
    "A player that gives one answer after the other."
    waiting = iter(moves)
    return lambda fens: [PolicyAnswer(best=next(waiting))]


def said(player, *lines: str) -> list[str]:
    return list(uci_session(lines, player))


def test_positions_are_set_up_as_described():
    assert uci_board(['startpos']).fen() == chess.STARTING_FEN
    assert uci_board('startpos moves e2e4 e7e5'.split()).fen().startswith('rnbqkbnr/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/RNBQKBNR w')
    fen = 'r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 3 9'
    assert uci_board(f'fen {fen}'.split()).fen() == fen
    assert uci_board(f'fen {fen} moves e1g1'.split()).fen() == 'r3k2r/8/8/8/8/8/8/R4RK1 b kq - 4 9'


def test_the_protocol_is_answered_line_by_line():
    player = stubborn('e2e4', 'd2d4')
    assert said(player, 'uci', '', 'debug on', 'setoption name Hash value 1', 'isready', 'stop') == [
        'id name rookworld_nb', 'id author rookworld_nb', 'uciok', 'readyok']
    assert said(player, 'position startpos\n', 'go wtime 1 btime 1\n') == ['info depth 1 score cp 50 pv e2e4', 'bestmove e2e4']
    assert said(player, 'position startpos moves e2e4', 'quit', 'go') == []


@pytest.mark.parametrize('search, end', [('go infinite', 'stop'), ('go ponder wtime 1', 'ponderhit'), ('go ponder', 'stop')])
def test_a_search_without_an_end_waits_to_be_told(search, end):
    assert said(stubborn('e2e4'), search, 'isready') == ['info depth 1 score cp 50 pv e2e4', 'readyok']
    assert said(stubborn('e2e4'), search, 'isready', end, end, 'isready')[1:] == ['readyok', 'bestmove e2e4', 'readyok']


def test_an_illegal_best_move_gives_way_to_a_candidate_and_then_to_chance():
    assert said(stubborn('e7e5', 'd2d4'), 'go')[-1] == 'bestmove d2d4'
    drawn = {said(stubborn('e7e5'), f'position startpos moves {first}', 'go')[-1] for first in ('a2a3', 'b2b3')}
    assert drawn == {'bestmove e7e5'}  # legal now
    lost = [list(uci_session(['go'], stubborn(), seed=seed))[-1] for seed in range(6)]
    assert len({*lost}) > 1 and lost == [list(uci_session(['go'], stubborn(), seed=seed))[-1] for seed in range(6)]
    assert all(chess.Move.from_uci(line.split()[1]) in chess.Board().legal_moves for line in lost)


@pytest.mark.parametrize('position', ['fen rubbish', f'fen {chess.STARTING_FEN}2345', 'fen 8/8/8/8/8/8/8/8 w - - 0 1', 'startpos moves e2e5', 'startpos moves what', ''])
def test_a_bad_position_is_named_and_no_move_made_for_another(position):
    answers = said(stubborn('e7e5'), 'position startpos moves e2e4', f'position {position}', 'go', 'position startpos moves e2e4', 'go')
    assert answers[0].startswith('info string position left out: ') and answers[1] == 'bestmove (none)' and answers[-1] == 'bestmove e7e5'
    assert said(stubborn('e7e5'), f'position {position}', 'go infinite', 'isready', 'stop')[1:] == ['readyok', 'bestmove (none)']


def test_a_move_that_is_listed_twice_has_its_first_evaluation():
    answer = PolicyAnswer(moves=('e2e4', 'd2d4', 'e2e4'), evals=(.3, .2, -9.), best='e2e4')
    assert said(lambda fens: [answer], 'go') == ['info depth 1 score cp 30 pv e2e4', 'bestmove e2e4']


@pytest.mark.parametrize(('pawns', 'words'), [(.31, 'cp 31'), (-12.5, 'cp -1250'), (999.97, 'mate 3'), (-999.79, 'mate -21'), (5e8, 'mate 1'), (0., 'cp 0')])
def test_a_mate_is_said_as_a_mate(pawns, words):
    answer = PolicyAnswer(moves=('e2e4',), evals=(pawns,), best='e2e4')
    assert said(lambda fens: [answer], 'go')[0] == f'info depth 1 score {words} pv e2e4'


@pytest.mark.parametrize('plies', [0, -1, 11])
def test_a_prompt_shows_one_to_ten_plies(nano, plies):
    pytest.importorskip('ipywidgets', reason='ipywidgets is not installed')
    from rookworld_nb.play import Partner
    with pytest.raises(SuiteError, match=f'history_plies={plies}'): Partner(*nano, history_plies=plies)


def test_a_finished_game_has_no_move_to_think_of(nano):
    pytest.importorskip('ipywidgets', reason='ipywidgets is not installed')
    from rookworld_nb.play import Partner
    with pytest.raises(ValueError, match='the game is over'): Partner(*nano).think(chess.Board('7k/6Q1/6K1/8/8/8/8/8 b - - 0 1'))


def test_an_answer_to_a_position_of_its_own_is_no_answer(nano, monkeypatch):
    easier = f'P: {chess.STARTING_FEN} M: e2e4 E: 0.1 B: e2e4'
    monkeypatch.setattr('rookworld_nb.suites.completions', lambda *_: [easier])
    assert model_player(*nano)([chess.STARTING_FEN])[0].best is None
    asked = [(chess.STARTING_FEN, ['e2e4'])]
    monkeypatch.setattr('rookworld_nb.suites.completions', lambda *_: [f'A: {chess.STARTING_FEN}+d2d4+d2d4+{chess.STARTING_FEN}+0.001+0+0'])
    assert model_world(model_simulator(*nano))(asked) == [None]


def test_a_finished_game_has_no_move(nano):
    assert said(model_player(*nano), 'position fen 7k/6Q1/6K1/8/8/8/8/8 b - - 0 1', 'go') == ['bestmove (none)']


@pytest.mark.slow
def test_games_against_a_random_mover_by_way_of_the_command():
    rng, plies = random.Random(0), []
    command = [sys.executable, '-m', 'rookworld_nb.cli', 'uci']
    with chess.engine.SimpleEngine.popen_uci(command, timeout=120, stderr=subprocess.DEVNULL) as engine:
        assert engine.id['name'] == 'rookworld_nb nano'
        for number in range(2):
            board = chess.Board()
            while not board.is_game_over(claim_draw=True) and board.ply() < 30:
                own = board.turn == (number % 2 == 0)
                move = engine.play(board, chess.engine.Limit(time=.1), game=number).move if own else rng.choice([*board.legal_moves])
                assert move in board.legal_moves
                board.push(move)
            plies.append(board.ply())
    assert min(plies) > 4


# ---- the game

widgets = pytest.importorskip('ipywidgets', reason='ipywidgets is not installed')
from rookworld_nb.play import Game, Partner, PlayBoard, Replay, play_game, square_look, think  # noqa: E402


class Scripted(Partner):
    "A partner that plays what it is told and foresees nothing."
    def __init__(self, *moves: str) -> None:
        self.moves, self.rng, self.foreseen = list(moves), random.Random(0), []

    def player(self, fens):
        move = self.moves.pop(0) if self.moves else None
        return [PolicyAnswer(moves=(move,) if move else (), evals=(), best=move)]

    def foresee(self, board, move):
        self.foreseen.append(move.uci())
        return EnvAnswer()


def clicked(game: Game, *names: str) -> Game:
    for name in names: game.click(chess.parse_square(name))
    return game


def test_a_game_that_the_model_wins_and_its_check_are_said():
    assert clicked(Game(Scripted('e7e5', 'd8h4')), 'f2', 'f3', 'g2', 'g4').words() == 'checkmate: the model wins'
    assert clicked(Game(Scripted('e7e5', 'd8h4')), 'f2', 'f4', 'a2', 'a3').words() == 'd8h4, its best move: check'


def test_a_game_that_black_begins_is_taken_back_to_its_start():
    game = clicked(Game(Scripted('e2e4'), chess.BLACK, board=chess.Board(chess.STARTING_FEN.replace(' w ', ' b '))), 'e7', 'e5')
    assert len(game.board.move_stack) == 2
    game.take_back()
    assert not game.board.move_stack and game.board.turn == chess.BLACK


def test_clicks_take_up_move_and_lay_down():
    game = Game(Scripted('e7e5'))
    assert clicked(game, 'e4').selected is None and clicked(game, 'e7').selected is None
    assert clicked(game, 'g1').selected == chess.G1 and {*game.targets()} == {chess.F3, chess.H3}
    assert clicked(game, 'g1').selected is None and clicked(game, 'g1', 'e2').selected == chess.E2
    assert clicked(game, 'e5').selected is None and game.board.ply() == 0
    clicked(game, 'e2', 'e4')
    assert [move.uci() for move in game.board.move_stack] == ['e2e4', 'e7e5'] and game.selected is None
    assert game.partner.foreseen == ['e2e4'] and game.thought.source == 'best' and game.words() == 'e7e5, its best move'


def test_castling_and_promotion_are_two_clicks():
    game = Game(Scripted('a7a6'), board=chess.Board('4k3/P7/8/8/8/8/8/4K2R w K - 0 1'), promotion=chess.KNIGHT)
    assert clicked(game, 'e1', 'g1').board.move_stack[0] == chess.Move.from_uci('e1g1')
    game = Game(Scripted(), board=chess.Board('4k3/P7/8/8/8/8/8/4K2R w K - 0 1'), promotion=chess.KNIGHT)
    assert clicked(game, 'a7', 'a8').board.move_stack[0] == chess.Move.from_uci('a7a8n')


def test_black_waits_for_white_and_takes_back_its_own_move():
    game = Game(Scripted('e2e4', 'd2d4', 'g1f3'), chess.BLACK)
    assert game.board.ply() == 1 and clicked(game, 'e7', 'e5').board.ply() == 3
    game.take_back()
    assert [move.uci() for move in game.board.move_stack] == ['e2e4'] and game.board.turn == chess.BLACK and game.words() == 'your move'
    game.take_back()
    assert game.board.ply() == 1  # the model's first move stays
    untouched = Game(Scripted('e2e4'), chess.BLACK)
    thought = untouched.thought
    untouched.take_back()
    assert untouched.thought is thought is not None and untouched.diagrams()    # there was nothing to undo
    assert clicked(game, 'd7', 'd5').board.peek().uci() == 'g1f3'


def test_a_game_that_is_over_takes_no_clicks_and_says_why():
    game = Game(Scripted('e7e5', 'b8c6', 'g8f6'))
    clicked(game, 'e2', 'e4', 'd1', 'h5', 'f1', 'c4', 'h5', 'f7')
    assert game.over and game.words() == 'checkmate: you win' and clicked(game, 'a2', 'a4').board.ply() == 7
    game.take_back()
    assert not game.over and game.board.ply() == 6 and clicked(game, 'a2').selected == chess.A2
    stalemate = Game(Scripted(), board=chess.Board('7k/8/5KQ1/8/8/8/8/8 w - - 0 1'))
    assert clicked(stalemate, 'g6', 'f7').words() == 'stalemate: a draw'


ROOKS, SHUFFLE = '4k2r/8/8/8/8/8/8/R3K3 w - - 0 1', ('a1b1', 'h8g8', 'b1a1', 'g8h8')


def test_a_repetition_ends_the_game_when_it_is_there_and_not_when_it_could_come():
    board = chess.Board(ROOKS)
    for move in SHUFFLE + SHUFFLE: board.push_uci(move)
    assert (game := Game(Scripted(), board=board.copy())).over and clicked(game, 'a1').selected is None
    board.pop()
    assert board.can_claim_threefold_repetition() and not board.is_repetition(3)    # the move g8h8 would repeat
    game = Game(Scripted('g8g1'), chess.WHITE, board=board)                         # and Black mates or wins instead
    assert not game.over and game.board.ply() == 8 and game.words().startswith('g8g1')
    white, black = (stubborn_line(SHUFFLE[start::2]*3) for start in (0, 1))
    thoughts = play_game(white, black, fen=ROOKS)
    assert len(thoughts) == 8 and [thought.move for thought in thoughts] == [*SHUFFLE*2]
    with pytest.raises(ValueError, match='at least one ply'): Replay([])
    replay = Replay(thoughts)
    assert replay.diagram(8).title == 'after 8 plies: 1/2-1/2'
    over = chess.Board(ROOKS)
    for move in SHUFFLE*2: over.push_uci(move)
    game = Game(Scripted(), board=over)
    assert game.over and game.words() == 'threefold repetition: a draw'
    quiet = Game(Scripted(), board=chess.Board(ROOKS.replace('0 1', '100 80')))
    assert quiet.over and quiet.words() == 'fifty moves: a draw'


def test_the_diagram_says_what_was_played_instead():
    game = clicked(Game(Scripted('e2e4')), 'e2', 'e4')    # the model answers White's move, illegal for Black
    lines = [text for text, _ in game.diagrams()[0].lines]
    assert lines == ['1. e2e4 · its best · illegal', f'{game.thought.move} · played']
    thought = think(lambda fens: [PolicyAnswer(moves=('a1a8', 'd2d4'), best='a1a8')], chess.STARTING_FEN, random.Random(0))
    assert [text for text, _ in Replay([thought]).diagram(0).lines] == ['1. a1a8 · its best · illegal', '2. d2d4 · played']


def test_a_step_into_a_position_of_its_own_is_not_foreseen(nano, monkeypatch):
    monkeypatch.setattr('rookworld_nb.suites.completions', lambda *_: [f'A: {chess.STARTING_FEN}+d2d4+d2d4+{chess.STARTING_FEN}+0.001+0+0'])
    assert Partner(*nano).foresee(chess.Board(), chess.Move.from_uci('e2e4')).new_fen is None


def test_the_fall_back_is_said():
    game = clicked(Game(Scripted('e2e4')), 'e2', 'e4')
    assert game.thought.source == 'random' and 'random' in game.words() and game.board.ply() == 2
    thought = think(lambda fens: [PolicyAnswer(moves=('a1a8', 'd2d4'), best='a1a8')], chess.STARTING_FEN, random.Random(0))
    assert (thought.move, thought.source) == ('d2d4', 'listed')


def test_what_it_thought_is_drawn_beside_the_rules(nano):
    game = clicked(Game(Partner(*nano)), 'e2', 'e4')
    thought, *step = game.diagrams()
    assert thought.title == 'what it thought' and thought.fen.split()[1] == 'b' and thought.white_below
    assert step[-1].title == 'the rules' and step[-1].fen == thought.fen


# ---- widgets

def test_the_board_follows_the_clicks():
    table = PlayBoard(Scripted('e7e5'))
    name = lambda button: next(kind[3:] for kind in button._dom_classes if kind[3:] in chess.SQUARE_NAMES)
    assert [name(button) for button in table.grid.children][:2] == ['a8', 'b8'] and name(table.grid.children[-1]) == 'h1'
    table.squares[chess.E2].click()
    assert 'rw-chosen' in table.squares[chess.E2]._dom_classes and 'rw-target' in table.squares[chess.E4]._dom_classes
    table.squares[chess.E4].click()
    assert table.squares[chess.E4].description.startswith('♟') and 'rw-white' in table.squares[chess.E4]._dom_classes
    assert table.squares[chess.E2].description == '\xa0' and 'rw-last' in table.squares[chess.E5]._dom_classes
    assert 'what it thought' in table.thought.value and table.words.value == 'e7e5, its best move'
    table.back.click()
    assert table.squares[chess.E2].description.startswith('♟') and table.thought.value == ''
    table.black.click()
    assert name(table.grid.children[0]) == 'h1' and table.game.colour == chess.BLACK and table.game.board.ply() == 1


def test_a_promotion_takes_the_chosen_piece():
    table = PlayBoard(Scripted())
    table.game = Game(Scripted(), board=chess.Board('4k3/P7/8/8/8/8/8/4K3 w - - 0 1'))
    table.promotion.value = chess.ROOK
    for square in (chess.A7, chess.A8): table.squares[square].click()
    assert table.game.board.move_stack[0].uci() == 'a7a8r'


def test_no_class_of_a_square_has_a_meaning_on_the_dashboard():
    from rookworld_nb.dashboard import Dashboard
    shared = {kind for square in chess.SQUARES for kind in square_look(Game(Scripted()), square, {})[1]}
    dash = Dashboard(total_steps=1, levers={'kl_coef': .1, 'lr_scale': 1.})
    assert shared & {kind for widget in vars(dash).values() for kind in getattr(widget, '_dom_classes', ())} == set()


def test_light_and_dark_squares_are_where_they_belong():
    game = Game(Scripted())
    dark = {square for square in chess.SQUARES if 'rw-dark' in square_look(game, square, {})[1]}
    assert chess.A1 in dark and chess.H1 not in dark and len(dark) == 32


def test_two_players_play_legally_to_the_end_or_the_limit():
    rng = random.Random(1)
    def any_move(fens): return [PolicyAnswer(best=rng.choice([*chess.Board(fens[0]).legal_moves]).uci())]
    thoughts = play_game(any_move, stubborn('e7e5'), max_plies=30)
    board = chess.Board()
    for thought in thoughts:
        assert board.fen() == thought.fen
        board.push_uci(thought.move)
    assert len(thoughts) == 30 and thoughts[1].source == 'best' and {thought.source for thought in thoughts[::2]} == {'best'}
    mate = play_game(stubborn('f2f3', 'g2g4'), stubborn('e7e5', 'd8h4'), fen='rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2')
    assert [thought.move for thought in mate] == ['d8h4']


def test_the_replay_shows_each_ply_and_the_result():
    thoughts = play_game(stubborn(), stubborn('d8h4'), fen='rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2')
    replay = Replay(thoughts, ('us', 'them'))
    assert 'them plays d8h4' in replay.view.value and replay.slider.max == 1 and replay.diagram(0).white_below
    replay.slider.value = 1
    assert 'after 1 plies: 0-1' in replay.view.value
    assert Replay(play_game(stubborn('e2e4'), stubborn(), max_plies=1)).diagram(1).title == 'after 1 plies: not over'


def test_a_reply_that_was_interrupted_comes_with_the_next_click():
    class Interrupted(Scripted):
        def think(self, board):
            if self.moves[0] == 'Ctrl-C': raise KeyboardInterrupt(self.moves.pop(0))
            return super().think(board)
    game = Game(Interrupted('Ctrl-C', 'e7e5'))
    with pytest.raises(KeyboardInterrupt): clicked(game, 'e2', 'e4')
    assert game.board.turn == chess.BLACK
    assert clicked(game, 'd2').board.peek().uci() == 'e7e5' and game.board.turn == chess.WHITE
