"""Prompts with images have the tokens and the positions that transformers gives them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from ostinato.errors import ModelError, RequestError
from ostinato.media.media_item import MediaItem
from ostinato.media.media_prompt import Placeholders, media_prompt, placeholders
from ostinato.media.preprocess import TiledImage, Video
from tests.support.media_cases import END, IMAGE, START, VIDEO, encode, tokenizer, vision_spec

OWN = Placeholders(IMAGE, VIDEO, START, END, IMAGE, IMAGE)
IMAGE_TEXT, VIDEO_TEXT = START + IMAGE + END, START + VIDEO + END


def item(rows, columns, kept=None):
    """An image of so many tokens; its patches do not matter here."""
    num_tokens = rows * columns if kept is None else len(kept)
    kept = None if kept is None else np.array(kept, dtype=np.int64)
    return MediaItem(np.zeros((0, 0), np.float32), (rows * 2, columns * 2), num_tokens, f"{rows}x{columns}", kept)


def video(rows, columns, timestamps):
    return Video(tuple(item(rows, columns) for _ in timestamps), tuple(timestamps))


def prompt(text, media):
    return media_prompt(text, media, OWN, encode, vision_spec())


def theirs(token_ids, media):
    """Positions [tokens, 3] and the delta that transformers gives a prompt."""
    vision = vision_spec()
    kinds = [{vision.image_token_id: 1, vision.video_token_id: 2}.get(token, 0) for token in token_ids]
    grids = {Video: [], MediaItem: []}
    for each in media:
        first = each.items[0] if isinstance(each, Video) else each
        grids[type(each)].append([len(each.items) if isinstance(each, Video) else 1, *first.grid])
    config = Qwen3VLConfig(vision_config={"spatial_merge_size": vision.merge_size})
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    positions, delta = model.get_rope_index(
        torch.tensor([token_ids]),
        torch.tensor([kinds]),
        torch.tensor(grids[MediaItem]) if grids[MediaItem] else None,
        torch.tensor(grids[Video]) if grids[Video] else None,
    )
    return positions[:, 0].T.numpy(), int(delta)


CASES = {
    "text only": ("hello there", []),
    "one image": (f"a{IMAGE_TEXT}b", [item(2, 3)]),
    "at the beginning": (f"{IMAGE_TEXT}b", [item(1, 1)]),
    "at the very end": (f"a{START}{IMAGE}", [item(3, 2)]),
    "adjacent images": (f"a{IMAGE_TEXT}{IMAGE_TEXT}", [item(2, 2), item(4, 1)]),
    "several sizes": (f"x{IMAGE_TEXT}y{IMAGE_TEXT}z{IMAGE_TEXT}", [item(5, 5), item(1, 7), item(9, 2)]),
    "a video": (f"a{VIDEO_TEXT}b", [video(2, 3, [0.25, 1.25, 2.0])]),
    "both": (f"a{VIDEO_TEXT}b{IMAGE_TEXT}", [video(2, 3, [0.5]), item(3, 3)]),
    "two videos and images": (
        f"{IMAGE_TEXT}{VIDEO_TEXT}{VIDEO_TEXT}{IMAGE_TEXT}end",
        [item(1, 2), video(2, 1, [0.1, 0.3]), video(1, 1, [11.05]), item(2, 1)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_positions_are_those_of_transformers(name):
    text, media = CASES[name]
    found = prompt(text, media)
    positions, delta = theirs(found.token_ids, media)
    np.testing.assert_array_equal(found.rope.prompt, positions)
    assert found.rope.delta == delta


@given(
    parts=st.lists(
        st.one_of(
            st.text("ab c", min_size=1, max_size=5),
            st.builds(item, st.integers(1, 9), st.integers(1, 9)),
            st.builds(video, st.integers(1, 4), st.integers(1, 4), st.lists(st.floats(0, 99), min_size=1, max_size=3)),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=50, deadline=None)
def test_any_mixture_has_the_positions_of_transformers(parts):
    text = "".join(p if isinstance(p, str) else VIDEO_TEXT if isinstance(p, Video) else IMAGE_TEXT for p in parts)
    media = [part for part in parts if not isinstance(part, str)]
    found = prompt(text, media)
    positions, delta = theirs(found.token_ids, media)
    np.testing.assert_array_equal(found.rope.prompt, positions)
    assert found.rope.delta == delta


def test_the_token_before_an_image_stands_for_it_in_the_template_of_gemma():
    """Its processor writes blank lines around an image, its tokens and the token behind them."""
    vision = vision_spec(places="start", image_side=24, video_token_id=None)
    own = placeholders(tokenizer().token_text, encode, vision)
    assert (own.image, own.token) == (START, IMAGE)
    found = media_prompt(f"a{START}b", [item(3, 3)], own, encode, vision)
    inside = [vision.start_token_id, *[vision.image_token_id] * 9, vision.end_token_id]
    assert found.token_ids == [*encode("a\n\n"), *inside, *encode("\n\nb")]
    assert [(span.start, span.end) for span in found.spans] == [(4, 13)]
    with pytest.raises(RequestError, match=r"holds the text .*, which stands for an image"):
        own.check_absent(f"see {IMAGE}")


def test_crops_of_an_image_follow_it_in_the_words_of_gemmas_processor():
    own = placeholders(tokenizer().token_text, encode, vision_spec(places="start", video_token_id=None))
    image = TiledImage((item(3, 3), item(3, 3), item(3, 3)), (1, 2), has_crops=True)
    found = media_prompt(f"a{START}b", [image], own, encode, vision_spec(video_token_id=None))
    whole = f"\n\n{START}{IMAGE * 9}{END}\n\n"
    words = f"aHere is the original image {whole} and here are some crops to help you see better {whole} {whole}b"
    assert found.token_ids == encode(words)
    assert [span.end - span.start for span in found.spans] == [9, 9, 9]


def test_tokens_around_an_image_that_its_template_leaves_to_the_processor_are_written():
    """As Gemma 4's does."""
    vision = vision_spec(places="enclosed", video_token_id=None)
    own = placeholders(tokenizer().token_text, encode, vision)
    found = media_prompt(f"a{IMAGE}b", [item(2, 3)], own, encode, vision)
    inside = [vision.start_token_id, *[vision.image_token_id] * 6, vision.end_token_id]
    assert found.token_ids == [*encode("a"), *inside, *encode("b")]
    assert [(span.start, span.end) for span in found.spans] == [(2, 8)]


def test_a_video_of_gemma_4_has_the_text_of_its_processor():
    """Times are minutes and seconds between spaces, and every frame is enclosed as an image is."""
    vision = vision_spec(places="enclosed")
    own = placeholders(tokenizer().token_text, encode, vision)
    frames = video(2, 3, [0.0, 59.9, 61.5])
    shell = Gemma4Processor.__new__(Gemma4Processor)
    shell.boi_token, shell.eoi_token, shell.video_token = START, END, VIDEO
    metadata = VideoMetadata(total_num_frames=3, fps=10.0, frames_indices=[0, 599, 615])
    inputs = {"num_soft_tokens_per_video": [6], "video_metadata": [metadata]}
    expected = f"a{shell.replace_video_token(inputs, 0)}b{START}{IMAGE * 4}{END}"
    found = media_prompt(f"a{VIDEO}b{IMAGE}", [item(2, 2), frames], own, encode, vision)
    assert found.token_ids == encode(expected)
    assert [span.item for span in found.spans][:3] == list(frames.items)


def test_the_token_of_videos_need_not_be_a_special_one_in_gemma_4s_tokenizer():
    """Its processor makes it one, and the text of it is the same in all."""
    vision = vision_spec(places="enclosed", video_token_id=1000)
    own = placeholders(tokenizer().token_text, encode, vision)
    assert own.video == "<|video|>"
    found = media_prompt("<|video|>", [video(1, 2, [3.0])], own, encode, vision)
    assert found.token_ids == [*encode("00:03 "), vision.start_token_id, 1000, 1000, vision.end_token_id]


def test_spans_hold_the_placeholders_tokens_and_no_others():
    vision = vision_spec()
    text, media = CASES["two videos and images"]
    found = prompt(text, media)
    inside = set(itertools.chain.from_iterable(range(start, end) for start, end, _ in found.spans))
    stand_ins = {vision.image_token_id, vision.video_token_id}
    assert {i for i, token in enumerate(found.token_ids) if token in stand_ins} == inside
    assert [span.end - span.start for span in found.spans] == [span.item.num_tokens for span in found.spans]
    expected = [media[0], *media[1].items, *media[2].items, media[3]]
    assert [id(span.item) for span in found.spans] == [id(each) for each in expected]


def test_the_text_is_expanded_as_the_processor_of_transformers_expands_it():
    text, media = CASES["both"]
    shell = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    shell.image_token, shell.video_token = IMAGE, VIDEO
    shell.vision_start_token, shell.vision_end_token = START, END

    class _VideoProcessor:
        merge_size = temporal_patch_size = 2

    class _Metadata:
        fps = 2.0
        frames_indices = [0, 2]  # noqa: RUF012

    shell.video_processor = _VideoProcessor()
    of_video = shell.replace_video_token(
        {"video_grid_thw": np.array([[1, 4, 6]]), "video_metadata": [_Metadata()]}, video_idx=0
    )
    expected, _ = shell.get_text_with_replacements([text], [IMAGE * 9], [of_video])
    assert prompt(text, media).token_ids == encode(expected[0])


def test_times_are_written_with_one_digit_behind_the_point():
    found = prompt(VIDEO_TEXT, [video(1, 1, [0.25, 10.0])])
    text = tokenizer().decode(found.token_ids, skip_special_tokens=False)
    assert text == f"{START}<0.2 seconds>{VIDEO_TEXT}<10.0 seconds>{VIDEO_TEXT}{END}"


def test_images_and_videos_go_to_their_own_placeholders():
    """A template may show videos before images, whatever their order in the message."""
    image, frames = item(1, 2), video(2, 2, [0.0])
    found = prompt(VIDEO_TEXT + IMAGE_TEXT, [image, frames])
    assert [span.item for span in found.spans] == [frames.items[0], image]


def test_kept_tokens_stand_where_they_stood_and_what_follows_too():
    whole = prompt(f"a{IMAGE_TEXT}b", [item(3, 4)])
    kept = [0, 5, 11]
    pruned = prompt(f"a{IMAGE_TEXT}b", [item(3, 4, kept)])
    start = whole.spans[0].start
    expected = np.delete(whole.rope.prompt, [start + i for i in range(12) if i not in kept], axis=0)
    np.testing.assert_array_equal(pruned.rope.prompt, expected)
    assert pruned.rope.delta == whole.rope.delta + 9
    np.testing.assert_array_equal(
        pruned.rope.of(len(pruned.token_ids), len(pruned.token_ids) + 2),
        whole.rope.of(len(whole.token_ids), len(whole.token_ids) + 2),
    )


def test_an_item_of_which_nothing_is_kept_has_no_span_and_keeps_its_room():
    clip = Video((item(2, 2), item(2, 2, []), item(2, 2)), (0.0, 1.0, 2.0))
    found = prompt(VIDEO_TEXT, [clip])
    assert len(found.spans) == 2
    whole = prompt(VIDEO_TEXT, [video(2, 2, [0.0, 1.0, 2.0])])
    np.testing.assert_array_equal(found.rope.prompt[-1], whole.rope.prompt[-1])


@pytest.mark.parametrize(
    ("text", "media", "message"),
    [
        ("no place", [item(1, 1)], "1 images, but the chat template made places for 0"),
        (IMAGE_TEXT, [], "0 images, but the chat template made places for 1"),
        (IMAGE_TEXT * 2, [item(1, 1)], "places for 2"),
        (IMAGE_TEXT, [video(1, 1, [0.0])], "0 images"),
        (VIDEO_TEXT, [], "0 videos"),
    ],
)
def test_places_and_images_that_do_not_match_are_refused(text, media, message):
    with pytest.raises(RequestError, match=message):
        prompt(text, media)


def test_placeholders_are_the_texts_of_the_models_tokens():
    own = tokenizer()
    assert placeholders(own.token_text, encode, vision_spec()) == OWN


@pytest.mark.parametrize("token_id", [100_000, tokenizer().token_id("\u0120")])
def test_a_tokenizer_without_the_tokens_of_images_is_a_model_error(token_id):
    """An id without a text, or with one that is no token of its own when it is written."""
    with pytest.raises(ModelError, match=f"config.json has {token_id}"):
        placeholders(tokenizer().token_text, encode, vision_spec(video_token_id=token_id))


def test_a_placeholder_in_a_text_of_a_user_is_found():
    OWN.check_absent(f"nothing here {START} {END}")
    for text in (f"a {IMAGE}", f"{VIDEO} b"):
        with pytest.raises(RequestError, match="stands for an image"):
            OWN.check_absent(text)
