"""Conversations with images are answered as transformers answers them: from pixels to tokens."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ostinato import LLM, SamplingParams
from ostinato.errors import RequestError
from ostinato.media.media_input import RenderedChat, load_media_input
from tests.support.checkpoints import randomize
from tests.support.folders import shared_folder
from tests.support.media_cases import END, IMAGE, START, TEMPLATE, VIDEO, drawn, tokenizer
from tests.support.vl_models import TEXT, VISION, VL_RECIPES, as_videos, inputs_of_images, seen_by

NUM_TOKENS = 24
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_num_seqs": 4,
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "cache_memory": "16MiB",
}
PIXELS = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
"""Patches are of 4 pixels a side here, so that small images have several."""


@cache
def oracle() -> transformers.PreTrainedModel:
    own = tokenizer()
    ids = {
        "image_token_id": own.token_id(IMAGE),
        "video_token_id": own.token_id(VIDEO),
        "vision_start_token_id": own.token_id(START),
        "vision_end_token_id": own.token_id(END),
    }
    text = TEXT | {"vocab_size": own.vocab_size, "eos_token_id": own.token_id("<|im_end|>")}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=True, **ids)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model, 0)
    return model.eval()


@cache
def checkpoint() -> Path:
    directory = shared_folder("images")
    oracle().save_pretrained(directory)
    (directory / "tokenizer.json").write_text(tokenizer().to_json() or "")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(PIXELS))
    (directory / "generation_config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def make(**settings: Any) -> LLM:
    return LLM(str(checkpoint()), **{**SMALL, **settings})


def theirs(rendered: RenderedChat) -> list[int]:
    """What transformers' model says after the prompt and its images."""
    assert rendered.media is not None
    vision = oracle().config
    ids = torch.tensor([rendered.media.token_ids])
    images = [span for span in rendered.media.spans if ids[0, span.start] == vision.image_token_id]
    videos = [span for span in rendered.media.spans if ids[0, span.start] == vision.video_token_id]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["mm_token_type_ids"] = (ids == vision.image_token_id).int() + 2 * (ids == vision.video_token_id).int()
    for name, grids, spans in (
        ("pixel_values", "image_grid_thw", images),
        ("pixel_values_videos", "video_grid_thw", videos),
    ):
        if spans:
            inputs[name] = torch.from_numpy(np.concatenate([np.asarray(span.item.patches) for span in spans]))
            inputs[grids] = torch.tensor([(1, *span.item.grid) for span in spans])
    with torch.no_grad():
        out = oracle().generate(
            **inputs, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, use_cache=True
        )
    return out[0, ids.shape[1] :].tolist()


def image(height: int, width: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"type": "image", "image": drawn(height, width, seed), **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


TALKS = {
    "one image": [user(text("what is it?"), image(40, 48))],
    "several sizes": [user(image(16, 16), text("and"), image(64, 24, 1), image(8, 90, 2), text("which?"))],
    "a video": [
        user({"type": "video", "video": [drawn(32, 40, i) for i in range(5)], "fps": 2}, text("what happens?"))
    ],
    "a later turn": [
        user(image(24, 24)),
        {"role": "assistant", "content": "noise"},
        user(text("and this?"), image(32, 16, 5)),
    ],
    "image and video": [user(image(20, 20), {"type": "video", "video": [drawn(24, 24, i) for i in (1, 2)], "fps": 1})],
}


@pytest.mark.parametrize("name", TALKS)
def test_a_conversation_is_answered_as_transformers_answers_it(llm: LLM, name: str) -> None:
    rendered = llm.engine.render_chat_media(TALKS[name])
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    [output] = llm.chat(TALKS[name], params)
    assert rendered.media is not None
    assert output.prompt_token_ids == rendered.media.token_ids
    assert output.outputs[0].token_ids == theirs(rendered)


@cache
def gemma4_oracle(name: str) -> transformers.PreTrainedModel:
    own, config = tokenizer(), VL_RECIPES[name]()
    config.image_token_id, config.video_token_id = own.token_id(IMAGE), own.token_id(VIDEO)
    config.boi_token_id, config.eoi_token_id = own.token_id(START), own.token_id(END)
    config.audio_token_id = own.vocab_size + 9
    config.text_config.vocab_size = config.text_config.vocab_size_per_layer_input = own.vocab_size
    config.text_config.eos_token_id = own.token_id("<|im_end|>")
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model, 0)
    return model.eval()


@cache
def gemma4_checkpoint(name: str = "gemma4") -> Path:
    """A model of Gemma 4 with images, whose template writes their token or that of a video alone. Treat it as
    read-only."""
    directory = shared_folder("gemma4")
    gemma4_oracle(name).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(tokenizer().to_json() or "")
    template = TEMPLATE.replace(f"{START}{IMAGE}{END}", IMAGE).replace(f"{START}{VIDEO}{END}", VIDEO)
    (directory / "chat_template.jinja").write_text(template)
    patch, merge = (4, 2) if name == "gemma4" else (1, 4)
    sizes = {"max_soft_tokens": 70, "patch_size": patch, "pooling_kernel_size": merge}
    processors = {"image_processor": sizes | {"do_normalize": False}, "video_processor": sizes}
    (directory / "processor_config.json").write_text(json.dumps(processors))
    (directory / "generation_config.json").write_text("{}")
    return directory


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified"])
def test_gemma4_answers_a_conversation_as_transformers_does(name: str) -> None:
    """Start and end are put around the tokens of each image and of each frame, which has its time before it."""
    llm, side = LLM(str(gemma4_checkpoint(name)), **SMALL), 1 if name == "gemma4_unified" else 2
    frames = {"type": "video", "video": [drawn(20, 24, i) for i in (1, 2)], "fps": 0.5}
    talk = [user(text("what is it?"), image(40, 48), image(9, 50, 2), frames, text("and why?"))]
    rendered = llm.engine.render_chat_media(talk)
    assert rendered.media is not None
    grids = [(rows * side, columns * side) for rows, columns in ((7, 9), (3, 19), (7, 9), (7, 9))]
    assert [span.item.grid for span in rendered.media.spans] == grids
    [output] = llm.chat(talk, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    vision, model = llm.engine.runner.vision, gemma4_oracle(name)
    assert vision is not None
    assert output.prompt_token_ids == rendered.media.token_ids
    between = llm.get_tokenizer().encode(" 00:02 ", add_special_tokens=False)
    assert rendered.media.token_ids[rendered.media.spans[2].end + 1 :][: len(between)] == between
    whole = torch.tensor([[*rendered.media.token_ids, *output.outputs[0].token_ids]])
    types = (whole == vision.image_token_id).int() + 2 * (whole == vision.video_token_id).int()
    assert [int((types == kind).sum()) for kind in (1, 2)] == [63 + 57, 2 * 63]
    items = [span.item for span in rendered.media.spans]
    given = inputs_of_images(vision, items[:2]) | as_videos(model, inputs_of_images(vision, items[2:]))
    logits = model(whole, **seen_by(model, types), **given, use_cache=False).logits[0]
    assert logits[-NUM_TOKENS - 1 : -1].argmax(-1).tolist() == output.outputs[0].token_ids


def test_streams_give_what_chats_give(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    [output] = llm.chat(TALKS["one image"], params)
    assert "".join(llm.stream_chat(TALKS["one image"], params)) == output.outputs[0].text


def test_several_conversations_at_once_give_what_each_gives_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    together = llm.chat(list(TALKS.values()), params)
    alone = [llm.chat(talk, params)[0] for talk in TALKS.values()]
    assert [each.outputs[0].text for each in together] == [each.outputs[0].text for each in alone]


def test_another_image_in_the_same_place_is_another_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    talks = [[user(image(48, 48, seed), text("long enough to fill the blocks behind the image"))] for seed in (1, 2)]
    texts = [llm.chat(talk, params)[0].outputs[0].text for talk in (*talks, *talks)]
    assert texts[0] != texts[1]
    assert texts[:2] == texts[2:]


def test_a_second_turn_about_an_image_finds_it_in_the_cache(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    llm.reset_prefix_cache()
    first = [user(image(64, 64, 9), text("one"))]
    [output] = llm.chat(first, params)
    assert output.num_cached_tokens == 0
    following = [*first, {"role": "assistant", "content": output.outputs[0].text}, user(text("two"))]
    [output] = llm.chat(following, params)
    image_tokens = 64
    assert output.num_cached_tokens is not None
    assert output.num_cached_tokens > image_tokens


def test_an_encoded_image_is_found_by_requests_of_the_same_salt_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    llm.reset_prefix_cache()
    misses = []
    # The texts before the image differ, so that it is in no prefix of another request.
    for number, salt in enumerate((None, None, "one", "two", "two")):
        llm.chat([user(text(f"{number}: "), image(32, 32, 3), text("what?"))], params, cache_salt=salt)
        misses.append(llm.stats()["encoder"]["cache"]["misses"])
    assert [after - before for before, after in itertools.pairwise(misses)] == [0, 1, 1, 0]


def test_an_image_with_too_many_tokens_is_refused_when_it_comes(llm: LLM) -> None:
    large = image(400, 400, min_pixels=160_000, max_pixels=10**6)
    with pytest.raises(RequestError, match="max_pixels") as error:
        llm.chat([user(large)])
    [remedy] = error.value.remedies
    large |= {"min_pixels": 1, "max_pixels": remedy.value}
    assert llm.chat([user(large)], SamplingParams(max_tokens=1))[0].finished


def test_a_pruned_video_is_shorter_and_answered() -> None:
    pruning = make(video_pruning_rate=0.5)
    still = [drawn(32, 32)] * 8
    clip = {"type": "video", "video": still, "fps": 2}
    rendered = pruning.engine.render_chat_media([user(clip)])
    assert rendered.media is not None
    assert [span.item.num_tokens for span in rendered.media.spans] == [4, 4]
    [output] = pruning.chat([user(clip, text("what?"))], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


def test_images_are_fetched_with_leave_alone_and_from_public_addresses(llm: LLM) -> None:
    remote = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    with pytest.raises(RequestError, match="allow_remote_images"):
        llm.chat([user(remote)])
    with pytest.raises(RequestError, match="not on the public internet"):
        make(allow_remote_images=True).chat([user(remote)])


def test_a_placeholder_in_a_text_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="stands for an image"):
        llm.chat([user(text(f"a {IMAGE} b"))])
    assert llm.generate(f"a {IMAGE} b", SamplingParams(max_tokens=1))[0].finished


@pytest.mark.parametrize("name", ["audio_token_id", "sound_context_token_id"])
def test_a_placeholder_of_sounds_in_a_text_is_refused(llm: LLM, tmp_path: Path, name: str) -> None:
    """Models read another token in its place, so that it is no text either."""
    for path in checkpoint().iterdir():
        shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: tokenizer().token_id("<|im_end|>")}))
    tokens, plan = llm.get_tokenizer(), llm.plan
    media = load_media_input(tmp_path, llm.engine.spec.vision, tokens, plan, remote=False)
    assert media is not None
    with pytest.raises(RequestError, match=r"holds the text <\|im_end\|>, which stands for a sound"):
        media.placeholders.check_absent("a <|im_end|> b")
    for none in (None, -1, 10**9, "<|im_end|>"):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: none}))
        media = load_media_input(tmp_path, llm.engine.spec.vision, tokens, plan, remote=False)
        assert media is not None
        assert media.placeholders.sound is None
