"""CompressedCache and compress() around tiny random models of the families that are served."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.56")

import videokv  # noqa: E402
from videokv.adapters.transformers.models import cache_keyword  # noqa: E402
from videokv.transformers import CompressedCache  # noqa: E402

WINDOW = 12
SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "phi3": ("Phi3", {}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 32,
        },
    ),
    "qwen2-windows": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "max_window_layers": 1,
        },
    ),
}
WINDOWED = {"gemma3": (1, 3), "qwen2-windows": (1, 2)}

pytestmark = pytest.mark.filterwarnings("ignore:layers .* have a sliding window")


def make(family: str, **changes):
    name, options = FAMILIES[family]
    config_class = getattr(transformers, f"{name}{'Text' * (name == 'Gemma3')}Config")
    config = config_class(**{**SIZES, "num_hidden_layers": 2, **options, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for parameter in model.parameters():  # norms that start at 0 would hide what they scale
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model


def text(tokens: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, tokens), generator=generator)


@torch.inference_mode()
def prefill(model, cache, ids, sizes) -> torch.Tensor:
    parts = torch.split(ids, sizes, dim=1)
    return torch.cat([model(part, **{cache_keyword(model): cache}).logits for part in parts], 1)


@torch.inference_mode()
def dense(model, ids) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def generate(model, ids, cache=None, **options):
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(
        ids, **({} if cache is None else {cache_keyword(model): cache}), **options
    )


def error(found, expected) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_equals_the_full_prompt(family):
    model, ids = make(family), text(63, batch=2)
    expected = dense(model, ids)
    for sizes in ([63], [20, 20, 20, 3], [5, 1, 1, 50, 6]):
        with CompressedCache(model, "bf16", chunk=16) as cache:
            assert error(prefill(model, cache, ids, sizes), expected) < 2e-6
            assert {cache.get_seq_length(layer) for layer in range(len(cache))} == {63}


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_are_near_and_error_falls_with_bits(family):
    model, ids = make(family), text(64)
    expected = dense(model, ids)
    errors = []
    for bits in (2, 4, 8):
        with CompressedCache(model, f"rtn-{bits}bit", chunk=16) as cache:
            errors.append(error(prefill(model, cache, ids, [16] * 4), expected))
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0
    assert errors[2] < 0.01


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_equals_the_stock_cache(family, beams):
    model, ids = make(family), text(21, batch=2)
    options = {"max_new_tokens": 14, "num_beams": beams}
    expected = generate(model, ids, **options)
    with CompressedCache(model, "bf16", chunk=8) as cache:
        assert torch.equal(generate(model, ids, cache, **options), expected)


# R35: layers that are not packed are said.
@pytest.mark.parametrize("family", WINDOWED)
def test_window_layers_are_listed_and_bounded(family):
    model, ids = make(family), text(60)
    with pytest.warns(UserWarning, match=r"layers \(1, .*sliding window and stay dense"):
        cache = CompressedCache(model, "rtn-2bit", chunk=16)
    with cache:
        prefill(model, cache, ids, [30, 30])
        cache.commit()
        assert cache.window_layers == WINDOWED[family]
        packed, total = cache.kv.memory(), cache.memory()
        rows = cache.layers[1].held()[0]
        assert rows.shape[2] == WINDOW - 1
        dense_bytes = 2 * len(WINDOWED[family]) * rows.nbytes
        assert total.dense_bytes - packed.dense_bytes == dense_bytes
        assert total.held_bytes - packed.held_bytes >= dense_bytes
        assert total.bits_per_element == packed.bits_per_element


def test_window_layers_let_a_long_prompt_go():
    model = make("gemma3")
    with CompressedCache(model, "bf16", chunk=16) as cache:
        prefill(model, cache, text(90), [90])
        for layer in cache.window_layers:
            keys, _ = cache._windows[layer].held()
            assert keys.untyped_storage().nbytes() == keys.nbytes


def test_models_without_windows_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CompressedCache(make("llama"), "bf16").close()


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_where_every_layer_has_a_window_the_sequence_ends_there(family):
    model = make(family, sliding_window=40)
    ids = text(41)
    expected = dense(model, ids[:, :40])
    with CompressedCache(model, "bf16", chunk=16) as cache:
        assert (cache.limit, cache.window_layers) == (40, ())
        assert error(prefill(model, cache, ids[:, :40], [20, 20]), expected) < 2e-6
        with pytest.raises(ValueError, match="window of 40 tokens.*ends at 41"):
            prefill(model, cache, ids[:, 40:], [1])
        cache.crop(-10)
        found = prefill(model, cache, ids[:, 30:40], [10])
    assert error(found, expected[:, 30:]) < 2e-6


# -- padding on the left ---------------------------------------------------------------------


def padded(lengths, tokens=30):
    ids, mask = text(tokens, batch=len(lengths)), torch.zeros(len(lengths), tokens)
    for row, length in enumerate(lengths):
        mask[row, tokens - length :] = 1
        ids[row, : tokens - length] = 0
    return ids, mask.long()


PADDED = ["llama", "qwen3", *WINDOWED]


@pytest.mark.parametrize("family", PADDED)
def test_padded_batches_generate_what_the_stock_cache_does(family):
    model = make(family)
    ids, mask = padded([30, 7, 19])
    expected = generate(model, ids, attention_mask=mask, max_new_tokens=12)
    with videokv.compress(model, "bf16") as kv:
        assert torch.equal(generate(model, ids, attention_mask=mask, max_new_tokens=12), expected)
        assert len(kv.caches) == 3
        generate(model, ids[:1], max_new_tokens=2)
        assert len(kv.caches) == 1


@pytest.mark.parametrize("family", PADDED)
def test_each_padded_row_is_packed_as_if_it_ran_alone(family):
    model = make(family)
    lengths = [30, 7, 19]
    ids, mask = padded(lengths)
    found = {}
    with CompressedCache(model, "rtn-2bit+taylor", chunk=8) as cache:
        for first, last in [(0, 5), (5, 24), (24, 30)]:  # the first has rows of pads alone
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, first:last]
            with torch.inference_mode():
                found[last] = model(
                    ids[:, first:last],
                    attention_mask=mask[:, :last],
                    position_ids=positions,
                    **{cache_keyword(model): cache},
                ).logits
        assert cache.get_seq_length() == 30
        if not cache.window_layers:
            cache.crop(-6)
            assert cache.get_seq_length() == 24 and cache.memory().bits_per_element < 16
    for row, length in enumerate(lengths):
        with CompressedCache(model, "rtn-2bit+taylor", chunk=8) as cache:
            pads = 30 - length
            cuts = [cut - pads for cut in (5, 24, 30) if cut > pads]
            sizes = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
            alone = prefill(model, cache, ids[row : row + 1, pads:], sizes)
        assert error(found[30][row : row + 1], alone[:, -6:]) < 2e-5


# -- the cache as an object (R13, R14, R15) --------------------------------------------------


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
@pytest.mark.parametrize("name", ["bf16", "rtn-2bit"])
def test_a_copy_goes_its_own_way(family, name):
    model, ids = make(family), text(50)
    with CompressedCache(model, name, chunk=16) as cache:
        prefill(model, cache, ids[:, :30], [20, 10])
        twin = copy.deepcopy(cache)
        first = prefill(model, cache, ids[:, 30:], [20])
        assert (cache.get_seq_length(), twin.get_seq_length()) == (50, 30)
        assert torch.equal(prefill(model, twin, ids[:, 30:], [20]), first)
        other = prefill(model, copy.deepcopy(twin), text(5, seed=1), [5])
        assert twin.get_seq_length() == 50 and other.shape[1] == 5
        cache.close()
        prefill(model, twin, ids[:, :1], [1])  # the copy holds the model's attention itself
        twin.close()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", WINDOWED)
def test_batch_rows_move_in_window_layers(family):
    model, ids = make(family), text(30, batch=3)
    order = torch.tensor([2, 0, 1, 1])
    expected = dense(model, ids)
    with CompressedCache(model, "bf16", chunk=8) as cache:
        prefill(model, cache, ids[:, :20], [20])
        cache.reorder_cache(order)
        found = prefill(model, cache, ids[order, 20:], [10])
        assert error(found, expected[order, 20:]) < 2e-6
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 2 and cache.layers[1].held()[0].shape[0] == 2


@pytest.mark.parametrize("family", WINDOWED)
def test_crop_with_window_layers(family):
    model, ids = make(family), text(40)
    expected = dense(model, ids)
    with CompressedCache(model, "bf16", chunk=8) as cache:
        prefill(model, cache, ids[:, :9], [9])
        cache.crop(-4)  # within the window nothing is lost
        assert error(prefill(model, cache, ids[:, 5:30], [25]), expected[:, 5:30]) < 2e-6
        with pytest.raises(ValueError, match="layer 1 keeps a window of 12.*activate_past"):
            cache.crop(-4)
        assert {cache.get_seq_length(layer) for layer in range(len(cache))} == {30}
        cache.activate_past_recording()
        prefill(model, cache, text(6, seed=1), [6])
        cache.crop(-6)
        assert error(prefill(model, cache, ids[:, 30:], [10]), expected[:, 30:]) < 2e-6
        cache.reset()
        assert error(prefill(model, cache, ids, [40]), expected) < 2e-6


@pytest.mark.parametrize("family", WINDOWED)
def test_a_forward_that_broke_off_leaves_the_windows_as_they_were(family):
    model, ids = make(family), text(40)
    expected = dense(model, ids)
    with CompressedCache(model, "bf16", chunk=8) as cache:
        prefill(model, cache, ids[:, :30], [30])
        hook = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prefill(model, cache, ids[:, 30:], [10])
        hook.remove()
        with pytest.raises(ValueError, match="finished 2 of"):
            prefill(model, cache, ids[:, 30:], [10])
        cache.crop(0)
        assert error(prefill(model, cache, ids[:, 30:], [10]), expected[:, 30:]) < 2e-6


# -- compress() ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_generate_inside_compress(family):
    model, ids = make(family), text(40)
    expected = generate(model, ids, max_new_tokens=12)
    with videokv.compress(model, "bf16") as kv:
        with pytest.raises(ValueError, match="run the model"):
            kv.memory()
        assert torch.equal(generate(model, ids, max_new_tokens=12), expected)
    assert "generate" not in vars(model) and model.config._attn_implementation == "sdpa"
    with videokv.compress(model, "rtn-4bit+calibrated", record_mass=True) as kv:
        for _ in range(2):
            generate(model, ids, max_new_tokens=12)
    assert kv.memory().bits_per_element < 6 and 0 < kv.mass().mean < 1
    assert torch.equal(generate(model, ids, max_new_tokens=12), expected)


def test_compress_honours_the_policy_and_a_cache_of_ones_own():
    model, ids = make("llama"), text(40)
    with videokv.compress(model, "rtn-2bit", chunk_tokens=8) as kv:
        generate(model, ids, max_new_tokens=4)
        assert kv.caches[0].recipe.policy.chunk_tokens == 8
        first = kv.caches
        with CompressedCache(model, "bf16") as cache:
            generate(model, ids, cache, max_new_tokens=4)
            assert cache.get_seq_length() == 43 and kv.caches == first


def test_compress_refuses_a_forward_without_a_cache():
    model = make("llama")
    with videokv.compress(model, "rtn-2bit"), pytest.raises(ValueError, match="brought none"):
        model(text(5))


def test_compress_restores_after_an_exception():
    model = make("llama")
    with pytest.raises(ZeroDivisionError), videokv.compress(model, "rtn-2bit"):
        1 / 0  # noqa: B018
    assert "generate" not in vars(model) and model.config._attn_implementation == "sdpa"


def test_verify_inside_compress():
    model, ids = make("gemma3"), text(40)
    with videokv.compress(model, "rtn-8bit", chunk_tokens=16, record_dense=True) as kv:
        generate(model, ids, max_new_tokens=4)
    assert [check.layer for check in kv.verify(0.02)] == [0, 2]  # the packed ones
    assert all(check.ok for check in kv.verify(0.02))
    ids, mask = padded([30, 7, 19])
    with videokv.compress(model, "rtn-8bit", chunk_tokens=8, record_dense=True) as kv:
        generate(model, ids, attention_mask=mask, max_new_tokens=4)
        assert {check.branch for check in kv.verify(0.02)} == {0, 1, 2}
    with videokv.compress(model, "rtn-8bit") as kv:
        generate(model, ids, max_new_tokens=2)
        with pytest.raises(ValueError, match="record_dense=True"):
            kv.verify()
