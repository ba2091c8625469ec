"""CompressedCache around tiny random language models."""

from __future__ import annotations

import gc
import subprocess
import sys
import types

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.56")

from watching import written_rows  # noqa: E402

import videokv  # noqa: E402
from videokv.adapters.transformers.attention import attention  # noqa: E402
from videokv.adapters.transformers.cache import CROPS_TO_LENGTH, CompressedCache  # noqa: E402
from videokv.adapters.transformers.models import cache_keyword, head_dims  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def tiny_llama(dtype: torch.dtype = torch.float32, *, layers: int = 2, **config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=96,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            initializer_range=0.2,
            **config,
        )
        return transformers.LlamaForCausalLM(made).to(dtype).eval()


@pytest.fixture
def model():
    return tiny_llama()


def text(tokens: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, (batch, tokens), generator=generator)


@torch.inference_mode()
def prefill(model, cache, ids, sizes) -> torch.Tensor:
    parts = torch.split(ids, sizes, dim=1)
    return torch.cat([forward(model, part, cache).logits for part in parts], 1)


def forward(model, ids, cache, **options):
    return model(ids, **{cache_keyword(model): cache}, **options)


def generate(model, ids, cache=None, **options):
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(
        ids, **({} if cache is None else {cache_keyword(model): cache}), **options
    )


def assert_near(found, expected, tolerance=1e-5):
    """Within ``tolerance`` of the largest logit."""
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance * float(expected.abs().max())
    )


@torch.inference_mode()
def dense(model, ids) -> torch.Tensor:
    return model(ids, use_cache=False).logits


# R25: queries of a chunk see the whole past and themselves: q=2, k=5; q=1, k=16; q=64, k=192.
@pytest.mark.parametrize(
    "sizes",
    [[3, 2], [15, 1], [128, 64], [63, 63, 63], [1, 1, 5, 1], [17], [40, 1, 1, 8, 1]],
    ids=str,
)
def test_bf16_equals_the_full_prompt(model, sizes):
    ids = text(sum(sizes), batch=2)
    expected = dense(model, ids)
    with CompressedCache(model, "bf16") as cache:
        assert_near(prefill(model, cache, ids, sizes), expected)
        assert cache.get_seq_length() == sum(sizes)


def test_bf16_equals_the_full_prompt_in_float64():
    model = tiny_llama(torch.float64)
    ids = text(70)
    expected = dense(model, ids)
    with CompressedCache(model, "bf16", chunk=16) as cache:
        assert_near(prefill(model, cache, ids, [30, 23, 17]), expected, 1e-13)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_output_keeps_the_dtype(dtype):
    model = tiny_llama(dtype)
    ids = text(48)
    expected = dense(model, ids)
    with CompressedCache(model, "bf16") as cache:
        found = prefill(model, cache, ids, [16, 32])
    assert found.dtype == dtype
    error = (found - expected).float().norm() / expected.float().norm()
    assert error < TOLERANCE[dtype]


def test_error_falls_with_bits(model):
    ids = text(128)
    expected = dense(model, ids)
    errors = []
    for name in ("rtn-2bit", "rtn-4bit", "rtn-8bit", "bf16"):
        with CompressedCache(model, name, chunk=32) as cache:
            errors.append(float((prefill(model, cache, ids, [32] * 4) - expected).norm()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 8 * errors[3]


def test_first_chunk_reads_no_packed_key(model):
    ids = text(64)
    expected = dense(model, ids)
    with CompressedCache(model, "rtn-2bit+taylor") as cache:
        found = prefill(model, cache, ids, [32, 32])
    assert_near(found[:, :32], expected[:, :32])
    assert not torch.allclose(found[:, 32:], expected[:, 32:], atol=1e-3)


@pytest.mark.parametrize("correction", ["taylor", "calibrated", "exact"])
def test_corrections_touch_packed_keys_only(model, correction, monkeypatch):
    """The noise is on the packed chunk alone; rows waiting dense and the current ones have none."""
    seen = []
    attend = videokv.Recipe.attend

    def spy(self, query, segments, **options):
        seen.append([(s.keys.shape[2], bool(s.noise)) for s in segments])
        return attend(self, query, segments, **options)

    monkeypatch.setattr(videokv.Recipe, "attend", spy)
    with CompressedCache(model, f"rtn-2bit+{correction}", chunk=32) as cache:
        prefill(model, cache, text(56), [32, 8, 16])
    assert seen[-1] == [(32, True), (8, False), (16, False)]


def test_a_correction_changes_the_result_and_puts_mass_back(model):
    ids = text(192)
    mass = {}
    for name in ("bf16", "rtn-2bit", "rtn-2bit+calibrated"):
        with CompressedCache(model, name, chunk=64, record_mass=True) as cache:
            prefill(model, cache, ids, [64] * 3)
            mass[name] = cache.mass().mean
    assert mass["rtn-2bit"] > mass["bf16"]
    shift = abs(mass["rtn-2bit+calibrated"] - mass["bf16"])
    assert shift < 0.5 * (mass["rtn-2bit"] - mass["bf16"])


def test_softmax_scale_of_the_model_is_honoured(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.05
    ids = text(40)
    expected = dense(model, ids)
    with CompressedCache(model, "bf16") as cache:
        found = prefill(model, cache, ids, [25, 15])
    assert_near(found, expected)


# -- generate ------------------------------------------------------------------------------


def test_greedy_generation_equals_the_stock_cache(model):
    ids = text(21)
    expected = generate(model, ids, max_new_tokens=40)
    with CompressedCache(model, "bf16", chunk=16) as cache:
        found = generate(model, ids, cache, max_new_tokens=40)
        assert cache.get_seq_length() == expected.shape[1] - 1
    assert torch.equal(found, expected)


def test_beam_search_moves_packed_chunks(model):
    ids = text(40)
    expected = generate(model, ids, max_new_tokens=12, num_beams=3)
    with CompressedCache(model, "bf16", chunk=16) as cache:
        found = generate(model, ids, cache, max_new_tokens=12, num_beams=3)
    assert torch.equal(found, expected)


def test_generation_with_packed_keys_is_the_same_twice(model):
    ids = text(40)
    with CompressedCache(model, "quarot-2bit+calibrated", chunk=16) as cache:
        first = generate(model, ids, cache, max_new_tokens=20)
        assert cache.memory().bits_per_element < 4
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(first, generate(model, ids, cache, max_new_tokens=20))


# R02, R03: what is dense is bounded, however tokens come.
@pytest.mark.parametrize("sizes", [[100], [1000, 1], [10, *[1] * 300]], ids=["100", "1000", "1s"])
def test_dense_rest_is_less_than_a_chunk(sizes):
    model = tiny_llama(layers=1)
    with CompressedCache(model, "rtn-2bit", chunk=128) as cache:
        prefill(model, cache, text(sum(sizes)), sizes)
        cache.commit()
        segments = cache.kv.view(0)
        dense_tokens = sum(s.keys.shape[2] for s in segments) - 128 * (sum(sizes) // 128)
        assert dense_tokens == sum(sizes) % 128
        assert cache.kv.encode_calls == 2 * (sum(sizes) // 128)


# R03: R = 128 recent tokens and groups of G = 32; the first tokens may be kept exact.
@pytest.mark.parametrize(("tokens", "packed"), [(100, 0), (1000, 26)])
def test_recent_and_first_chunks_stay_exact(tokens, packed):
    model = tiny_llama(layers=1)
    recipe = videokv.recipe("rtn-2bit", sink_chunks=1, recent_chunks=4)
    with CompressedCache(model, recipe, chunk=32) as cache:
        prefill(model, cache, text(tokens), [tokens])
        cache.commit()
        exact = cache.kv.view(0)
        assert cache.kv.encode_calls == 2 * packed
    with CompressedCache(model, "bf16", chunk=32) as cache:
        prefill(model, cache, text(tokens), [tokens])
        cache.commit()
        dense = cache.kv.view(0)
    same = [torch.equal(a.keys, b.keys) for a, b in zip(exact, dense, strict=True)]
    assert same == [True] + [False] * packed + [True] * (len(same) - packed - 1)


def test_chunk_defaults_to_the_first_forward():
    model = tiny_llama(layers=1)
    with CompressedCache(model, "rtn-2bit") as cache:
        prefill(model, cache, text(150), [50, 50, 30, 20])
        cache.commit()
        assert [s.keys.shape[2] for s in cache.kv.view(0)] == [50, 50, 50]
        cache.reset()
        prefill(model, cache, text(600), [600])
        cache.commit()
        assert [s.keys.shape[2] for s in cache.kv.view(0)] == [512, 88]


# -- the cache as an object (R13, R14, R15) --------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "rtn-2bit"])
def test_second_question_on_one_context(model, name):
    ids, first, second = text(200), text(8, seed=1), text(9, seed=2)
    with CompressedCache(model, name, chunk=50) as cache:
        prefill(model, cache, ids, [50] * 4)
        lengths = [cache.get_seq_length()]
        prefill(model, cache, first, [8])
        lengths.append(cache.get_seq_length())
        cache.crop(-8)
        lengths.append(cache.get_seq_length())
        found = prefill(model, cache, second, [9])
        lengths.append(cache.get_seq_length())
    assert lengths == [200, 208, 200, 209]
    with CompressedCache(model, name, chunk=50) as cache:
        expected = prefill(model, cache, torch.cat([ids, second], 1), [50] * 4 + [9])[:, 200:]
    assert_near(found, expected)


def test_crop_clamps_and_refuses_the_old_meaning(model):
    with CompressedCache(model, "rtn-2bit", chunk=32) as cache:
        prefill(model, cache, text(3), [3])
        cache.crop(0)
        assert cache.get_seq_length() == 3
        if CROPS_TO_LENGTH:  # transformers 4
            cache.crop(2)
            cache.crop(7)
            assert cache.get_seq_length() == 2
        else:
            with pytest.raises(ValueError, match="minus the number of tokens"):
                cache.crop(2)
        cache.crop(-5)
        assert cache.get_seq_length() == 0
        prefill(model, cache, text(70), [64, 6])
        cache.crop(-30)
        prefill(model, cache, text(10), [10])
        assert cache.get_seq_length() == 50


def test_batch_rows_move_with_their_codes(model):
    ids = text(70, batch=3)
    with CompressedCache(model, "rtn-2bit", chunk=16) as cache:
        prefill(model, cache, ids, [64, 6])
        cache.commit()
        before = cache.kv.view(1)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2]))
        assert cache.batch_size == 2
        for old, new in zip(before, cache.kv.view(1), strict=True):
            assert torch.equal(new.keys, old.keys[[2, 0]])
            assert torch.equal(new.values, old.values[[2, 0]])


def test_a_forward_of_no_tokens_changes_nothing(model):
    """The model itself cannot run one; its attention layers can."""
    with CompressedCache(model, "rtn-2bit", chunk=16) as cache:
        prefill(model, cache, text(20), [20])
        for layer, block in enumerate(model.model.layers):
            key, query = torch.zeros(1, 2, 0, 32), torch.zeros(1, 6, 0, 32)
            key, value = cache.update(key, key.clone(), layer)
            output, _ = attention(block.self_attn, query, key, value, None)
            assert output.shape == (1, 0, 6, 32)
        assert cache.get_seq_length() == 20
        prefill(model, cache, text(12), [12])
        assert cache.get_seq_length() == 32


def test_dense_rows_are_freed(model):
    with CompressedCache(model, "rtn-2bit", chunk=16) as cache, written_rows() as rows:
        prefill(model, cache, text(80), [16] * 5)
        cache.commit()
        assert len(rows) == 2 * 5 and rows.alive() == 0


# -- what is refused -------------------------------------------------------------------------


def test_padding_on_the_right_and_changing_padding_are_refused(model):
    ids, mask = text(12, batch=2), torch.ones(2, 12, dtype=torch.long)
    full = mask.clone()
    mask[0, :3] = 0
    with CompressedCache(model, "bf16") as cache:
        forward(model, ids, cache, attention_mask=full)
        with pytest.raises(ValueError, match="came without padding"):
            forward(model, ids, cache, attention_mask=torch.cat([mask, mask], 1))
    with CompressedCache(model, "bf16") as cache:
        with pytest.raises(ValueError, match="padding on the left"):
            forward(model, ids, cache, attention_mask=mask.flip(1))
        cache.crop(0)
        forward(model, ids, cache, attention_mask=mask)
        with pytest.raises(ValueError, match="brought no attention mask"):
            forward(model, ids, cache)
        cache.crop(0)
        with pytest.raises(ValueError, match="row 0 had 3 pads.*now has 4 zeros"):
            shorter = torch.cat([mask, full], 1)
            shorter[0, 3] = 0
            forward(model, ids, cache, attention_mask=shorter)
        cache.crop(0)
        with pytest.raises(ValueError, match="beam search"):
            cache.reorder_cache(torch.tensor([1, 0]))


def test_a_mask_of_ones_own_is_refused(model):
    mask = torch.zeros(1, 1, 12, 12)
    with (
        CompressedCache(model, "bf16") as cache,
        pytest.raises(ValueError, match="mask of its own"),
    ):
        forward(model, text(12), cache, attention_mask=mask)


def test_layers_of_other_kinds_are_named(model):
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match=r"layers 1 \(chunked_attention\)"):
        CompressedCache(model, "bf16")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Gemma2", {"head_dim": 16}, "capped scores: layers 0, 1"),
        ("GptOss", {"num_local_experts": 2, "head_dim": 16}, "learnt sinks: layers 0, 1"),
        ("Roberta", {}, "not causal .*: layers 0, 1|attention function be set"),
        ("DiffLlama", {}, "splits after they were cached"),
    ],
)
def test_attention_of_another_kind_is_refused_before_anything_runs(name, options, words):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **options
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=words), videokv.compress(model, "bf16"):
        pass
    assert model.config._attn_implementation == before


def test_latent_attention_is_served_where_its_full_keys_are_cached():
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, vocab_size=97,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, first_k_dense_replace=2,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    ids = torch.arange(30)[None]
    if hasattr(model.model.layers[0].self_attn, "expand_kv"):
        with pytest.raises(ValueError, match="expanded .*: layers 0, 1"):
            CompressedCache(model, "bf16")
        return
    with CompressedCache(model, "bf16", chunk=10) as cache, torch.inference_mode():
        keyword = {cache_keyword(model): cache}
        found = [model(part, **keyword).logits for part in ids.split(10, dim=1)]
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)


def test_models_without_a_window_are_served():
    config = transformers.MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=None,
    )
    model = transformers.MistralForCausalLM(config).eval()
    expected = dense(model, text(30))
    with CompressedCache(model, "bf16") as cache:
        found = prefill(model, cache, text(30), [20, 10])
    assert_near(found, expected)


def test_replaced_attention_is_refused(model):
    cache = CompressedCache(model, "bf16")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="'sdpa', not 'videokv'"):
        prefill(model, cache, text(5), [5])


def test_a_cache_made_after_that_is_not_disturbed_by_the_old_one(model):
    old = CompressedCache(model, "bf16")
    model.set_attn_implementation("eager")
    with CompressedCache(model, "bf16") as cache:
        old.close()
        prefill(model, cache, text(5), [5])
    assert model.config._attn_implementation == "eager"


def test_another_model_is_refused(model):
    cache = CompressedCache(model, "bf16")
    with pytest.raises(ValueError, match="belongs to another model"):
        prefill(tiny_llama(), cache, text(5), [5])


def test_attention_without_the_cache_is_refused(model):
    with CompressedCache(model, "bf16"), pytest.raises(ValueError, match="brought none"):
        model(text(5))


def test_attention_is_restored(model):
    expected = dense(model, text(5))
    with CompressedCache(model, "bf16"), CompressedCache(model, "rtn-2bit"):
        assert model.config._attn_implementation == "videokv"
    assert model.config._attn_implementation == "sdpa"
    cache = CompressedCache(model, "bf16")
    prefill(model, cache, text(5), [5])
    del cache
    gc.collect()
    assert torch.equal(dense(model, text(5)), expected)


def test_attention_is_restored_after_an_error(model):
    with pytest.raises(ZeroDivisionError), CompressedCache(model, "bf16"):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_a_broken_forward_is_said_and_dropped(model):
    ids = text(30)
    expected = dense(model, ids)
    with CompressedCache(model, "bf16") as cache:
        prefill(model, cache, ids[:, :20], [20])
        second = model.model.layers[1].mlp
        hook = second.register_forward_pre_hook(lambda *_: 1 / 0)
        for target in (model.model.layers[0].mlp, second):
            hook.remove()
            hook = target.register_forward_pre_hook(lambda *_: 1 / 0)
            length = cache.get_seq_length()
            with pytest.raises(ZeroDivisionError):
                prefill(model, cache, ids[:, 20:], [10])
            if target is second:  # attention of all layers was done: the tokens are seen
                cache.crop(-10)
                continue
            with pytest.raises(ValueError, match="finished 1 of 2 layers"):
                prefill(model, cache, ids[:, 20:], [10])
            cache.crop(0)
            assert cache.get_seq_length(1) == length
        hook.remove()
        found = prefill(model, cache, ids[:, 20:], [10])
    assert_near(found, expected[:, 20:])


def test_another_batch_is_refused(model):
    with CompressedCache(model, "bf16") as cache:
        prefill(model, cache, text(5), [5])
        with pytest.raises(ValueError, match="holds a batch of 1"):
            prefill(model, cache, text(5, batch=2), [5])


def test_non_finite_keys_are_refused_naming_the_layer(model):
    torch.nn.init.constant_(model.model.layers[1].self_attn.k_proj.weight, torch.nan)
    with CompressedCache(model, "rtn-2bit") as cache:
        prefill(model, cache, text(5), [5])
        with pytest.raises(ValueError, match="layer 1"):
            cache.commit()


@pytest.mark.parametrize("chunk", [0, -4])
def test_chunk_must_be_positive(model, chunk):
    with pytest.raises(ValueError, match="chunk"):
        CompressedCache(model, "bf16", chunk=chunk)


def test_unknown_recipe_leaves_the_model_alone(model):
    with pytest.raises(ValueError):
        CompressedCache(model, "rtm-2bit")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rtn-2bit", {"group_size": 48}, "group_size 48 does not divide head_dim 32"),
        ("rtn-2bit-psac999", {}, "rank 999"),
    ],
)
def test_heads_that_do_not_fit_are_refused_before_any_work(model, name, options, message):
    with pytest.raises(ValueError, match=message):
        CompressedCache(model, videokv.recipe(name, **options))
    with (
        pytest.raises(ValueError, match=message),
        videokv.compress(model, name, **options),
    ):
        pass
    assert model.config._attn_implementation == "sdpa" and "generate" not in vars(model)


def test_head_sizes_are_read_from_the_configuration():
    def sizes(**config):
        return head_dims(types.SimpleNamespace(config=types.SimpleNamespace(**config)))

    assert sizes(head_dim=80, hidden_size=96, num_attention_heads=6) == (80, 80)
    assert sizes(head_dim=None, hidden_size=96, num_attention_heads=6) == (16, 16)
    latent = {"head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24}
    assert sizes(**latent) == (48, 24)
    assert sizes(head_dim=64, global_head_dim=128) is None
    assert sizes(hidden_size=96, num_attention_heads=[4, 6]) is None


def test_older_versions_are_refused(model, monkeypatch):
    monkeypatch.setattr("videokv.adapters.transformers.version", lambda _: "4.55.4")
    with (
        pytest.raises(ValueError, match=r"transformers 4\.56 and later, this is 4\.55\.4"),
        videokv.compress(model, "bf16"),
    ):
        pass
    with pytest.raises(ValueError, match="this is 4.55.4"):
        videokv.adapters.transformers.CompressedCache(model, "bf16")


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="transformers model"):
        CompressedCache(torch.nn.Linear(2, 2), "bf16")
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    with pytest.raises(ValueError, match="not a plain decoder"):
        CompressedCache(transformers.T5ForConditionalGeneration(config), "bf16")


def test_importing_the_adapters_imports_no_model_library():
    code = (
        "import sys, videokv.adapters as a, videokv.transformers; a.adapters(); "
        "sys.exit(bool({'transformers', 'diffusers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"foo": 1}, "no option foo"),
        ({"scale": 0.5}, "no option scale"),
        ({"record_mass": "yes"}, "True or False, got 'yes'"),
    ],
)
def test_unknown_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CompressedCache(tiny_llama(), "rtn-2bit", **options)
