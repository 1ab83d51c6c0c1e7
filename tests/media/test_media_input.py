"""Conversations with images become prompts, and what cannot be taken is refused by its place."""

from __future__ import annotations

import base64
import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.errors import MediaError, Remedy, RequestError
from ostinato.media.load import MediaSources
from ostinato.media.media_input import MediaInput, render_chat
from ostinato.media.media_prompt import Placeholders
from ostinato.media.message_media import split_media
from ostinato.media.processor_config import MediaSettings
from tests.support.media_cases import (
    END,
    IMAGE,
    START,
    TEMPLATE,
    VIDEO,
    drawn,
    encode,
    media_settings,
    tiled_settings,
    tokenizer,
    vision_spec,
)

TEMPLATES = ChatTemplate({"default": TEMPLATE})


def media_input(**changes):
    own = MediaInput(
        vision=vision_spec(),
        settings=media_settings(),
        placeholders=Placeholders(IMAGE, VIDEO, START, END, IMAGE, IMAGE),
        encode=encode,
        sources=MediaSources(files=True, remote=False),
        max_item_tokens=64,
        max_prompt_tokens=1000,
    )
    return replace(own, **changes)


def chat(*parts, role="user", media="default", others=None, **changes):
    messages = [{"role": role, "content": list(parts)}]
    own = media_input(**changes) if media == "default" else media
    return render_chat(messages, TEMPLATES.render, own, others)


def text(words):
    return {"type": "text", "text": words}


def image(source, **more):
    return {"type": "image", "image": source, **more}


def url_of(picture):
    content = io.BytesIO()
    picture.save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def decoded(rendered):
    return tokenizer().decode(rendered.media.token_ids, skip_special_tokens=False)


def test_images_stand_where_their_parts_stood():
    rendered = chat(text("see "), image(drawn(64, 64)), text(" and "), image(drawn(64, 96)))
    assert rendered.text == (
        f"<|im_start|>user\nsee {START}{IMAGE}{END} and {START}{IMAGE}{END}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decoded(rendered) == (
        f"<|im_start|>user\nsee {START}{IMAGE * 4}{END} and {START}{IMAGE * 6}{END}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [span.end - span.start for span in rendered.media.spans] == [4, 6]
    assert len(rendered.media.rope.prompt) == len(rendered.media.token_ids)


def tiled_chat(*parts):
    """As LFM2-VL's, whose template writes a placeholder without anything around it."""
    vision = vision_spec(cuts_tiles=True, is_naflex=True, temporal_patch_size=1, video_token_id=None)
    own = media_input(
        vision=vision,
        settings=MediaSettings(tiled_settings(), tiled_settings()),
        placeholders=Placeholders(IMAGE, None, "<|image_start|>", "<|image_end|>", IMAGE, IMAGE),
        max_item_tokens=256,
        max_prompt_tokens=4000,
    )
    template = ChatTemplate({"default": TEMPLATE.replace(START + IMAGE + END, IMAGE)})
    return render_chat([{"role": "user", "content": list(parts)}], template.render, own)


def test_tiles_have_their_row_and_column_before_them_and_the_whole_image_behind_them():
    """The text is that of transformers' processor."""
    rendered = tiled_chat(text("a"), image(drawn(600, 900)), image(drawn(300, 200)), text("b"))
    tiles = "".join(f"<|img_row_{row}_col_{column}|>{IMAGE * 256}" for row in (1, 2) for column in (1, 2, 3))
    large = f"<|image_start|>{tiles}<|img_thumbnail|>{IMAGE * 247}<|image_end|>"
    small = f"<|image_start|>{IMAGE * 70}<|image_end|>"
    assert decoded(rendered) == f"<|im_start|>user\na{large}{small}b<|im_end|>\n<|im_start|>assistant\n"
    assert [span.end - span.start for span in rendered.media.spans] == [256] * 6 + [247, 70]


@pytest.mark.parametrize("limit", [{"detail": "low"}, {"max_pixels": 100 * 32**2}])
def test_an_image_whose_pixels_a_message_limits_is_not_cut(limit):
    rendered = tiled_chat(image(drawn(600, 900), **limit))
    [span] = rendered.media.spans
    assert 80 < span.item.num_tokens <= (100 if "max_pixels" in limit else 256)


def test_a_model_that_takes_no_videos_says_so():
    with pytest.raises(MediaError, match="takes images, and no videos"):
        tiled_chat({"type": "video", "video": [drawn(64, 64)] * 2, "fps": 1})


def test_the_forms_of_an_image_are_one():
    picture = drawn(64, 64)
    forms = [
        image(picture),
        {"image": picture},
        {"type": "image_url", "image_url": {"url": url_of(picture)}},
        {"type": "image_url", "image_url": url_of(picture)},
        {"type": "image_url", "image_url": {"url": url_of(picture), "detail": "high"}},
        image(url_of(picture), detail="auto"),
    ]
    digests = {chat(form).media.spans[0].item.digest for form in forms}
    assert len(digests) == 1


def test_a_video_is_its_frames_with_their_times():
    frames = [drawn(64, 64, seed) for seed in range(4)]
    rendered = chat({"type": "video", "video": frames, "fps": 2})
    assert "<0.2 seconds>" in decoded(rendered)
    assert "<1.2 seconds>" in decoded(rendered)
    assert len(rendered.media.spans) == 2


def test_pruning_leaves_the_first_temporal_patch_alone_of_a_still_video():
    still = drawn(64, 64)
    whole = chat({"type": "video", "video": [still] * 8, "fps": 2})
    pruned = chat({"type": "video", "video": [still] * 8, "fps": 2}, pruning_rate=0.9)
    assert [span.item.num_tokens for span in pruned.media.spans] == [4]
    assert len(pruned.media.token_ids) == len(whole.media.token_ids) - 12


def test_text_alone_has_no_media():
    assert chat(text("hello")).media is None
    assert render_chat([{"role": "user", "content": "hi"}], TEMPLATES.render, media_input()).media is None


def test_a_conversation_shows_images_of_all_its_turns():
    messages = [
        {"role": "user", "content": [image(drawn(64, 64)), text("what?")]},
        {"role": "assistant", "content": "noise"},
        {"role": "user", "content": [text("and this?"), image(drawn(96, 64))]},
    ]
    rendered = render_chat(messages, TEMPLATES.render, media_input())
    assert [span.item.num_tokens for span in rendered.media.spans] == [4, 6]
    assert messages[0]["content"][0]["image"].size == (64, 64)


def test_a_model_of_text_alone_says_so():
    with pytest.raises(RequestError, match="takes text only"):
        chat(image(drawn(64, 64)), media=None)
    assert chat(text(f"{IMAGE} is text to it"), media=None).media is None


@pytest.mark.parametrize("placeholder", [IMAGE, VIDEO])
def test_a_placeholder_that_a_user_typed_is_no_image(placeholder):
    for parts, others in (
        ([text(f"look {placeholder}")], None),
        ([text(f"look {placeholder}"), image(drawn(64, 64))], None),
        ([text("look")], {"tools": [{"function": {"description": placeholder}}]}),
    ):
        with pytest.raises(RequestError, match="stands for an image"):
            chat(*parts, others=others)


def test_an_image_that_the_template_leaves_out_is_refused():
    with pytest.raises(RequestError, match="1 images, but the chat template made places for 0"):
        chat(image(drawn(64, 64)), role="system")


def test_detail_and_limits_change_the_size():
    picture = drawn(1024, 1024)
    own = replace(media_settings().image, max_pixels=2**20)
    changes = {"settings": replace(media_settings(), image=own), "max_item_tokens": 3000, "max_prompt_tokens": 4000}
    sizes = {
        name: chat(image(picture, **more), **changes).media.spans[0].item.num_tokens
        for name, more in {
            "auto": {},
            "high": {"detail": "high"},
            "low": {"detail": "low"},
            "at most": {"max_pixels": 4096},
            "at least": {"min_pixels": 2**21},
        }.items()
    }
    assert sizes["auto"] == sizes["high"] == 1024
    assert sizes["low"] == 256
    assert sizes["at most"] == 4
    assert sizes["at least"] >= 2048 - 100


def test_an_image_with_too_many_tokens_names_what_works():
    picture = drawn(500, 700)
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]: it is resized") as error:
        chat(text("x"), image(picture), max_item_tokens=20)
    [remedy] = error.value.remedies
    assert remedy.setting == "max_pixels"
    assert chat(image(picture, max_pixels=remedy.value), max_item_tokens=20).media.spans[0].item.num_tokens <= 20


def test_a_narrow_image_with_too_many_tokens_names_what_works():
    picture = Image.new("RGB", (6000, 32))
    with pytest.raises(RequestError) as error:
        chat(image(picture), max_item_tokens=10)
    [remedy] = error.value.remedies
    assert chat(image(picture, max_pixels=remedy.value), max_item_tokens=10).media.spans[0].item.num_tokens <= 10


def test_frames_with_too_many_tokens_are_refused_at_the_first():
    def opened(url):
        taken.append(url)
        content = io.BytesIO()
        drawn(500, 500).save(content, "PNG")
        return content.getvalue()

    taken = []
    with pytest.raises(RequestError, match="at most 3"):
        chat(
            {"type": "video", "video": [f"http://a/{i}" for i in range(4)], "fps": 1},
            max_item_tokens=3,
            sources=MediaSources(files=False, remote=True, fetch=opened),
        )
    assert taken == ["http://a/0"]


def test_an_image_that_asks_for_absurdly_many_pixels_is_never_made():
    with pytest.raises(RequestError, match="it is resized"):
        chat(image(drawn(64, 64), min_pixels=10**15))


def test_a_video_that_fills_a_request_is_never_made():
    video = {"type": "video", "video": [drawn(64, 64)] * 16, "fps": 1, "min_pixels": 64 * 1024 * 16}
    with pytest.raises(RequestError, match="are 512 tokens, and a request has room for 500"):
        chat(video, max_prompt_tokens=500)
    assert chat(video, max_prompt_tokens=500, pruning_rate=0.5).media.spans


def test_images_that_fill_a_request_are_refused():
    with pytest.raises(RequestError, match="has room for 10"):
        chat(*[image(drawn(64, 64))] * 3, max_prompt_tokens=10)


def test_too_many_images_are_refused_before_any_is_loaded():
    for parts in ([image("/absent")] * 3, [{"type": "video", "video": ["/absent"] * 3, "fps": 1}]):
        with pytest.raises(RequestError, match="has 3 images, frames of videos among them, and at most 2"):
            chat(*parts, max_images=2)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "needs image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url should be"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url should be"),
        ({"type": "image_url", "image_url": {"url": "x", "size": 3}}, "takes url and detail"),
        (
            {"type": "image_url", "image_url": {"url": "x", "detail": "ultra"}},
            "detail 'ultra' should be auto, high, low",
        ),
        (
            {"type": "image", "image": "x", "detail": np.array([1, 2])},
            r"detail .* should be auto, high, low",
        ),
        ({"type": "image", "image": "x", "resized_height": 3}, "a part image takes .*, and not resized_height"),
        ({"type": "image", "image": "x", "max_pixels": 0}, "max_pixels '0'"),
        ({"type": "image", "image": "x", "min_pixels": 10**400}, "min_pixels '10+' should be a whole number from 1"),
        ({"type": "image", "image": "x", "min_pixels": 9, "max_pixels": 8}, "above its max_pixels"),
        ({"type": "video", "video": "film.mp4", "fps": 1}, "a list of its frames"),
        ({"type": "video", "video": ["a", "b"]}, "needs fps"),
        ({"type": "video", "video": [], "fps": 1}, "at least 2 frames"),
        ({"type": "image", "image": "/absent.png"}, "cannot be read"),
        ({"type": "image", "image": None}, "an image is a path"),
    ],
)
def test_parts_that_are_not_as_they_should_be_name_their_place(part, message):
    with pytest.raises(RequestError, match=message) as error:
        chat(text("hello"), part)
    assert error.value.where == "messages[0].content[1]"
    assert error.value.message.startswith("messages[0].content[1]: ")


@pytest.mark.parametrize("kind", ["input_audio", "audio", "audio_url"])
def test_sounds_are_refused_by_name(kind):
    with pytest.raises(MediaError, match=rf"content\[1\]: no model takes sounds here, and this is an {kind}"):
        split_media([{"role": "user", "content": [text("what is it?"), {"type": kind, kind: "x"}]}])


@pytest.mark.parametrize(
    ("part", "why", "place"),
    [
        ({"type": "text", "txt": "a"}, "a part text takes text, and not txt", ".txt"),
        ({"type": "text"}, "a part text needs text, a string", ".text"),
        ({"type": "input_text", "text": 3}, "a part input_text needs text, a string", ".text"),
    ],
)
def test_texts_that_are_not_as_they_should_be_name_their_place(part, why, place):
    with pytest.raises(MediaError, match=why) as error:
        split_media([{"role": "user", "content": [image("x"), part]}])
    assert error.value.setting == f"messages[0].content[1]{place}"


def test_all_types_of_text_are_one_text_and_a_tool_answers_with_any_value():
    parts = [text("a"), {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c", "annotations": []}]
    value = {"role": "tool", "content": [{"type": "text", "value": 3}]}
    plain, _ = split_media([{"role": "user", "content": parts}, {"role": "tool", "content": parts}, value])
    assert [message["content"] for message in plain] == ["a\nb\nc", "a\nb\nc", value["content"]]


def test_an_image_s_error_reaches_other_processes_whole():
    error = MediaError("messages[0]", "is wrong", [Remedy("max_pixels", 3)])
    found = pickle.loads(pickle.dumps(error))
    assert (found.where, found.message, found.remedies) == (error.where, error.message, error.remedies)


def test_other_parts_and_messages_stay_as_they_are():
    others = [{"type": "file", "file": "x"}, {"type": ["image"], "image": "x"}]
    messages = [{"role": "user", "content": [text("a"), *others]}, {"role": "user"}]
    plain, found = split_media(messages)
    assert plain == messages
    assert not found


def test_the_same_image_has_the_same_digest_in_every_conversation():
    picture = np.asarray(drawn(64, 64))
    first = chat(image(picture)).media.spans[0]
    second = chat(text("later"), image(picture.copy())).media.spans[0]
    assert first.item.digest == second.item.digest
    assert first.start != second.start
