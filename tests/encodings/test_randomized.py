"""Randomized positions: the draws of training, the fixed ones of evaluation, and what is made of them."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.randomized import Randomized, random_subsets
from tape_pe.models import TapeLMForCausalLM
from tape_pe.ops import rotary_state

SIZES = EncodingSizes(32, 4, 2, 8, 3, 16, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)
bases = pytest.mark.parametrize("base", ["rope", "learned"])


def build(**options: object) -> Randomized:
    parsed = Randomized.options_class.from_dict("randomized", options)
    Randomized.check(SIZES, parsed)
    return Randomized(SIZES, parsed)


def tokens_of(length: int, rows: int = 1, **given: torch.Tensor) -> Tokens:
    return Tokens(torch.arange(length)[None], length, input_ids=torch.ones(rows, length, dtype=torch.long), **given)


def test_randomized_positional_encodings_1_seeded_sorted_unique_below_the_bound_fixed_in_eval() -> None:
    encoding = build(bound=40)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws += [encoding.positions(tokens_of(12, rows=5)) for _ in range(2)]
    for draw in draws:
        assert draw.shape == (5, 12)
        assert draw.dtype == torch.long
        assert (draw.diff(dim=1) > 0).all(), "sorted, and none twice"
        assert draw.min() >= 0
        assert draw.max() < 40
        assert len({tuple(row) for row in draw.tolist()}) == 5, "each row draws its own"
    assert torch.equal(draws[0], draws[2])
    assert torch.equal(draws[1], draws[3])
    assert not torch.equal(draws[0], draws[1]), "each forward draws anew"
    assert not torch.equal(draws[0], draws[4])

    encoding.eval()
    state = torch.get_rng_state()
    fixed = encoding.positions(tokens_of(16, rows=2))
    assert (fixed.diff(dim=1) > 0).all()
    assert fixed.min() >= 0
    assert fixed.max() < 40
    assert torch.equal(encoding.positions(tokens_of(9)), fixed[:, :9]), "a shorter text has the first ones"
    assert torch.equal(build(bound=40).eval().positions(tokens_of(16)), fixed), "a function of the config"
    assert not torch.equal(build(bound=40, eval_seed=1).eval().positions(tokens_of(16)), fixed)
    assert torch.equal(torch.get_rng_state(), state), "evaluation takes no random numbers"


def test_the_fixed_subset_never_changes() -> None:
    """Checkpoints do not hold it: it has to be the same with every version of everything."""
    assert build(eval_size=8).eval().positions(tokens_of(8)).tolist() == [[2, 3, 5, 7, 12, 15, 20, 25]]


def test_all_subsets_are_equally_likely() -> None:
    """Of rows of different sizes, 5 choose 1, 2, 3 and 5."""
    torch.manual_seed(0)
    sizes = torch.tensor([1, 2, 3, 5]).repeat(3000)
    drawn = random_subsets(sizes, 5)
    for size in (1, 2, 3, 5):
        counts = Counter(tuple(row[:size]) for row in drawn[sizes == size].tolist())
        assert set(counts) == set(itertools.combinations(range(5), size))
        assert max(counts.values()) - min(counts.values()) <= 5.5 * (3000 / len(counts)) ** 0.5


def test_positions_take_their_element_of_the_subset() -> None:
    """Gaps, padding and documents: all documents of a row share its subset, and padding does not count."""
    encoding = build(bound=16)
    positions = torch.tensor([[0, 3, 4, 15, 15], [0, 1, 0, 1, 2], [0, 0, 0, 1, 9]])
    segments = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [-1, -1, 0, 0, -1]])
    for _ in range(20):
        drawn = encoding.positions(Tokens(positions, 5, segments))
        assert drawn[0].tolist() == [0, 3, 4, 15, 15], "16 of 16"
        assert torch.equal(drawn[1, :2], drawn[1, 2:4])
        assert drawn[1, 4] > drawn[1, 3] > drawn[1, 2]
        assert 0 <= drawn[2, 2] < drawn[2, 3] < 16
    assert len({tuple(encoding.positions(Tokens(positions, 5, segments))[2, 2:4].tolist()) for _ in range(50)}) > 25


def test_rope_turns_by_the_drawn_positions() -> None:
    encoding = build()
    torch.manual_seed(3)
    drawn = encoding.positions(tokens_of(10, rows=3))
    torch.manual_seed(3)
    assert torch.equal(encoding.start(tokens_of(10, rows=3)), rotary_state(drawn, 8))
    assert encoding.embed(tokens_of(10)) is None
    assert not encoding.state_dict()
    encoding.eval()
    assert torch.equal(encoding.start(tokens_of(10)), rotary_state(encoding.positions(tokens_of(10)), 8))


def test_learned_rows_of_the_drawn_positions() -> None:
    encoding = build(base="learned", bound=40)
    assert encoding.position_embeddings.weight.shape == (40, 32)
    torch.manual_seed(3)
    drawn = encoding.positions(tokens_of(10, rows=3))
    torch.manual_seed(3)
    assert torch.equal(encoding.embed(tokens_of(10, rows=3)), encoding.position_embeddings.weight[drawn])
    assert encoding.start(tokens_of(10)) is None


def test_longer_than_it_can_represent() -> None:
    encoding = build(bound=20)
    assert encoding.positions(tokens_of(20)).tolist() == [list(range(20))]
    with pytest.raises(ValueError, match="position_ids hold 20: encoding='randomized' has bound=20"):
        encoding.positions(tokens_of(21))
    encoding.eval()
    with pytest.raises(ValueError, match="in evaluation, encoding='randomized' has max_position_embeddings=16"):
        encoding.positions(tokens_of(17))
    with pytest.raises(ValueError, match="in evaluation, encoding='randomized' has eval_size=18"):
        build(eval_size=18).eval().positions(tokens_of(19))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "alibi"}, "base='alibi': allowed values are rope, learned"),
        ({"bound": 15}, "bound=15: at least max_position_embeddings=16"),
        ({"bound": 32, "eval_size": 33}, "bound=32: at least encoding_options.eval_size=33"),
        ({"bound": 0}, "bound=0: at least 1"),
        ({"eval_size": -1}, "eval_size=-1: at least 1"),
        ({"eval_seed": -1}, "eval_seed=-1: at least 0"),
        ({"eval_seed": "x"}, "eval_seed='x': int"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"encoding_options.{message}"):
        build(**options)


@bases
def test_training_draws_and_evaluation_does_not(make_model, make_tokens, tmp_path, base) -> None:
    model, input_ids = make_model("randomized", encoding_options={"base": base}), make_tokens(3, 9)
    expected = model(input_ids).logits
    assert torch.equal(model(input_ids).logits, expected)
    model.train()
    torch.manual_seed(0)
    first, second = model(input_ids).logits, model(input_ids).logits
    torch.manual_seed(0)
    assert torch.equal(model(input_ids).logits, first)
    assert (first - second).abs().amax(dim=(1, 2)).min() > 1e-3
    model.save_pretrained(tmp_path)
    assert torch.equal(TapeLMForCausalLM.from_pretrained(tmp_path)(input_ids).logits, expected)


@bases
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_is_run_again_with_the_same_draw(make_model, make_tokens, base, reentrant) -> None:
    """Checkpointing around the whole model, so that the draw itself is run twice."""
    model = make_model("randomized", encoding_options={"base": base}).train()
    input_ids, grads = make_tokens(2, 9), []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model.zero_grad()
        embeds = model.get_input_embeddings()(input_ids)

        def run(embeds: torch.Tensor) -> torch.Tensor:
            return model(inputs_embeds=embeds, use_cache=False).logits

        if checkpointed:
            logits = torch.utils.checkpoint.checkpoint(run, embeds, use_reentrant=reentrant)
        else:
            logits = run(embeds)
        logits.square().sum().backward()
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_cached_tokens_of_another_draw_are_refused(make_model, make_tokens) -> None:
    model = make_model("randomized").train()
    with torch.no_grad():
        cache = model(make_tokens(1, 4)).cache
    with pytest.raises(ValueError, match="cache: encoding='randomized' draws positions anew"):
        model(make_tokens(1, 1), cache=cache)
    assert cache.position_ids.shape[1] == 4


@bases
def test_compiled_training_draws_what_eager_training_draws(make_model, make_tokens, base) -> None:
    torch._dynamo.reset()
    model = make_model("randomized", encoding_options={"base": base}, num_hidden_layers=1).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (7, 11):
        input_ids = make_tokens(2, length)
        torch.manual_seed(0)
        expected = model(input_ids).logits
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(input_ids).logits, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
