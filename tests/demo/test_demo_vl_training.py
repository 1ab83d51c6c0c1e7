"""Training of the vision-language model: its pixels and its quicker forward are those of transformers."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ostinato.demo.canvas import draw
from ostinato.demo.drawings import FAMILIES, Source, draw_scene, held_out
from ostinato.demo.scenes import COLOURS, KINDS, Scene, Shape

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from demo_vl_training.data import NOTHING, Encoder, _picture, batches, collate, example_patches, pictures, token_labels
from demo_vl_training.export import processor_configs
from demo_vl_training.model import Helper, build, loss_of, picture_loss, whiten
from demo_vl_training.shape import hf_config
from demo_vl_training.tokenizer import END, IMAGE, PAD, VIDEO, build_tokenizer, special_ids
from demo_vl_training.trainer import Run, optimizers, train

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def test_patches_are_those_of_the_processor_that_the_checkpoint_names():
    settings = processor_configs()["preprocessor_config.json"]
    kept = ("size", "patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
    processor = Qwen2VLImageProcessorPil(**{name: settings[name] for name in kept})
    rng = random.Random(0)
    for _ in range(12):
        image = draw(draw_scene(rng, Source(lambda _: True)))
        expected = processor(image, return_tensors="np")
        patches, grid = _picture(image)
        assert list(grid) == expected["image_grid_thw"][0].tolist()
        assert np.allclose(patches, expected["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_the_quicker_forward_has_the_loss_and_gradients_of_transformers(tokenizer: Tokenizer, family: str):
    torch.manual_seed(0)
    config = hf_config(tokenizer.get_vocab_size(), special_ids(tokenizer))
    quick = build(config)
    plain = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32).train()
    plain.load_state_dict(quick.state_dict())
    encoder = Encoder(tokenizer)
    special = encoder.special
    sequences = [encoder.sequence(conversation) for conversation in held_out(0, 5, family)]
    batch = collate(sequences, special[PAD], special[IMAGE], special[VIDEO])
    loss, _, _ = loss_of(quick, Helper(config.text_config.hidden_size), batch)
    labels = batch.ids.masked_fill(~batch.learned, -100)
    expected = plain(input_ids=batch.ids, attention_mask=batch.mask, labels=labels, **batch.inputs).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for (name, ours), theirs in zip(quick.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            scale = theirs.grad.abs().max().item() + 1e-6
            assert torch.allclose(ours.grad, theirs.grad, atol=2e-4 * scale), name


def test_the_patch_embedding_begins_with_components_of_one_scale(tokenizer: Tokenizer):
    model = build(hf_config(tokenizer.get_vocab_size(), special_ids(tokenizer)))
    patches = example_patches(Encoder(tokenizer), 0)
    whiten(model, patches)
    with torch.no_grad():
        seen = model.model.visual.patch_embed(patches)
    assert seen.mean(0).abs().max() < 1e-3
    correlations = torch.corrcoef(seen.T) - torch.eye(seen.shape[1])
    assert correlations.abs().max() < 0.01
    assert 0.2 < seen.std(0).min() < seen.std(0).max() < 1.01


def test_a_tokens_label_is_the_shape_that_it_sees():
    shape = Shape("star", "blue", x=0.25, y=0.5, radius=0.2, turned=0.0)
    scene = Scene(96, 64, "white", (shape,), "on the left", 0)
    labels = token_labels(scene, (1, 8, 12)).reshape(4, 6, 2)
    blue_star = [KINDS.index("star"), COLOURS.index("blue")]
    assert labels[1, 1].tolist() == labels[2, 1].tolist() == blue_star
    assert labels[0, 5].tolist() == labels[3, 4].tolist() == list(NOTHING)
    assert (labels[..., 0] == blue_star[0]).sum() == 2


@pytest.mark.slow
def test_the_encoder_learns_from_the_labels(tokenizer: Tokenizer):
    torch.manual_seed(0)
    config = hf_config(tokenizer.get_vocab_size(), special_ids(tokenizer))
    model, helper = build(config), Helper(config.text_config.hidden_size)
    whiten(model, example_patches(Encoder(tokenizer), 0))
    steppers = optimizers(model, helper)
    losses = []
    for step in range(12):
        loss = picture_loss(model, helper, *pictures(0, step))
        loss.backward()
        losses.append(loss.item())
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
    assert min(losses[-3:]) < 0.95 * losses[0]


@pytest.mark.slow
def test_a_run_that_has_ended_is_gone_on_with_by_a_longer_schedule(tokenizer: Tokenizer, tmp_path: Path):
    config = hf_config(tokenizer.get_vocab_size(), special_ids(tokenizer))
    for steps in (1, 3):
        train(Run(tmp_path, seed=0, tokens=300, threads=1, steps=steps, seconds=None), build(config), tokenizer)
        assert torch.load(tmp_path / "vision.pt")["counters"][0] == steps


def test_only_answers_and_their_ends_are_learned(tokenizer: Tokenizer):
    encoder = Encoder(tokenizer)
    for conversation in held_out(1, 10, "talk"):
        sequence = encoder.sequence(conversation)
        learned = [token for token, wanted in zip(sequence.ids, sequence.learned, strict=True) if wanted]
        answers = "".join(turn.question.answer + END for turn in conversation)
        assert tokenizer.decode(learned, skip_special_tokens=False) == answers


def test_a_prompt_is_the_conversation_up_to_its_last_answer(tokenizer: Tokenizer):
    encoder = Encoder(tokenizer)
    for family in FAMILIES:
        conversation = held_out(1, 3, family)[-1]
        prompt, whole = encoder.prompt(conversation), encoder.sequence(conversation)
        rest = tokenizer.decode(whole.ids[len(prompt.ids) :], skip_special_tokens=False)
        assert whole.ids[: len(prompt.ids)] == prompt.ids
        assert rest == conversation[-1].question.answer + END + "\n"


def test_batches_keep_to_their_tokens_and_are_the_same_for_the_same_seed(tokenizer: Tokenizer):
    encoder = Encoder(tokenizer)
    first, again = (list(batches(encoder, 5, 0, 400, 0.5)) for _ in range(2))
    assert all(batch.ids.numel() <= 400 for batch in first)
    assert [batch.ids.tolist() for batch in first] == [batch.ids.tolist() for batch in again]
    for batch in first:
        grids = batch.inputs.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.long))
        assert len(batch.inputs.get("pixel_values", [])) == int(grids.prod(1).sum())


def test_a_whole_word_is_one_token_and_every_text_is_decoded_to_itself(tokenizer: Tokenizer):
    assert len(tokenizer.encode("a red circle above a blue square").ids) == 7
    assert len(tokenizer.encode("<0.5 seconds>").ids) == 5
    for text in ["What is in the picture?", "Zorbex 🎉\n 9 + 3", "a\tb  c"]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
