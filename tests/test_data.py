"""Data in memory: an order that depends on seed and position alone, and sources that say what is wrong with them."""

import gzip
import os
import pickle
import struct
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image

from src.config import ROOT
from src.datamodules.base import Evaluated, ImageData, Images, Shares
from src.datamodules.folder import Folder
from src.datamodules.vision import TorchVision
from src.protocols import Batch

COUNT = 10  # training images of the numbered set; batches of 4 straddle its passes


class Numbered(ImageData):
    """Ten training images and five held-out ones (1, 2, 2), every pixel of each its own number; the label too."""

    def load(self):
        images = np.broadcast_to(np.arange(COUNT + 5, dtype=np.uint8)[:, None, None, None], (COUNT + 5, 1, 2, 2)).copy()
        labels = np.arange(COUNT + 5)
        return (images[:COUNT], labels[:COUNT]), (images[COUNT:], labels[COUNT:])


def numbered(rank=0, ranks=1, training=True, **options):
    data = Numbered(**{"channels": 1, "resolution": 2, "classes": 15, "batch": 4, "seed": 3, "val_batch": 2} | options)
    data.setup()
    data.trainer = SimpleNamespace(global_rank=rank, world_size=ranks, training=training)
    return data


def first(loader, count):
    """The first batches of an endless loader, whose workers are then let go."""
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


def rows(batches):
    return torch.cat([batch.labels for batch in batches])


# Order and shares


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_are_contiguous_and_together_cover_each_global_batch(ranks):
    shares = [list(Shares(100, 8, rank, ranks, batches=3)) for rank in range(ranks)]
    for number, together in enumerate(zip(*shares, strict=True)):
        assert [len(share) for share in together] == [8 // ranks] * ranks
        covered = [sample for share in together for sample in share]
        assert covered == list(range(100 + 8 * number, 100 + 8 * (number + 1)))


def test_shares_that_differ_are_multiples_of_their_unit_and_cover_the_batch():
    shares = [next(iter(Shares(100, 24, rank, 5, unit=4))) for rank in range(5)]
    assert [len(share) for share in shares] == [4, 4, 4, 4, 8]
    assert [number for share in shares for number in share] == list(range(100, 124))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_number_of_processes_reads_the_same_global_batches(ranks):
    alone = first(numbered(batch=8).train_dataloader(), 4)
    shares = [first(numbered(rank, ranks, batch=8).train_dataloader(), 4) for rank in range(ranks)]
    for whole, together in zip(alone, zip(*shares, strict=True), strict=True):
        assert [share.first for share in together] == [whole.first + r * 8 // ranks for r in range(ranks)]
        assert torch.equal(torch.cat([share.images for share in together]), whole.images)
        assert torch.equal(rows(together), whole.labels)


def test_every_pass_visits_each_image_once_in_an_order_of_its_own():
    seen = rows(first(numbered().train_dataloader(), 3 * COUNT // 2))[: 6 * COUNT].view(6, COUNT)
    assert torch.equal(seen.sort(1).values, torch.arange(COUNT).expand(6, -1))
    assert len(seen.unique(dim=0)) == 6


def test_another_seed_is_another_order_and_the_same_seed_the_same():
    orders = [rows(first(numbered(seed=seed).train_dataloader(), 5)) for seed in (3, 3, 4)]
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])


def test_a_batch_that_straddles_two_passes_ends_the_one_and_begins_the_other():
    batches = first(numbered().train_dataloader(), 5)
    whole = rows(batches)
    assert batches[2].first == 8
    assert set(batches[2].labels[:2].tolist()) == set(range(COUNT)) - set(whole[:8].tolist())
    assert torch.equal(batches[2].labels[2:], whole[10:12])
    assert sorted(whole[10:20].tolist()) == list(range(COUNT))


def test_batches_larger_than_the_data_set():
    (batch,) = first(numbered(batch=3 * COUNT).train_dataloader(), 1)
    assert torch.equal(batch.labels.view(3, COUNT).sort(1).values, torch.arange(COUNT).expand(3, -1))


def test_passes_far_apart_can_be_read_in_any_order():
    images = numbered().train
    late, early = images[range(73, 76)], images[range(2, 5)]
    again = Images(images.images, images.labels, 3)
    assert torch.equal(again[range(2, 5)].labels, early.labels)
    assert torch.equal(again[range(73, 76)].labels, late.labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_position_gives_the_batches_that_would_have_come_next(workers):
    uninterrupted = first(numbered().train_dataloader(), 6)
    resumed = numbered(workers=workers)
    resumed.position = 12
    for theirs, ours in zip(uninterrupted[3:], first(resumed.train_dataloader(), 3), strict=True):
        assert ours.first == theirs.first
        assert torch.equal(ours.images, theirs.images) and torch.equal(ours.labels, theirs.labels)


def test_a_batch_knows_its_sample_numbers():
    batch = first(numbered(rank=1, ranks=2).train_dataloader(), 2)[1]
    assert batch.first == 6
    assert torch.equal(batch.numbers, torch.tensor([6, 7]))
    part = batch.narrow(1, 2)
    assert torch.equal(part.numbers, torch.tensor([7])) and torch.equal(part.images, batch.images[1:])


def test_loaders_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first(numbered().train_dataloader(), 1)
    list(numbered().val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_loaders_can_be_sent_to_workers_that_are_started_afresh():
    """Where processes are spawned (macOS, Windows), the data and the collate function travel as pickles."""
    loader = numbered(workers=2).train_dataloader()
    images, _collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
    assert torch.equal(images[range(4)].labels, loader.dataset[range(4)].labels)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_held_out_batches_are_equal_on_every_process_and_cover_each_image(ranks):
    parts = [list(Evaluated(11, 2, rank, ranks)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {len(Evaluated(11, 2, 0, ranks))}
    assert {len(share) for part in parts for share in part} == {2}
    covered = sorted(number for part in parts for share in part for number in share)
    assert covered == list(range(len(covered))) and len(covered) >= 11


def test_held_out_images_come_in_their_own_order_and_begin_again_beyond_the_last():
    batches = list(numbered().val_dataloader())
    assert rows(batches).tolist() == [10, 11, 12, 13, 14, 10]
    assert torch.cat([batch.numbers for batch in batches]).tolist() == [0, 1, 2, 3, 4, 5]


# What happens to the images


def test_images_arrive_between_minus_one_and_one():
    data = numbered()
    batch = Batch(torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1), torch.zeros(3, dtype=torch.int64), 0)
    found = data.on_after_batch_transfer(batch, 0).images
    assert found.dtype == torch.float32
    assert torch.allclose(found.flatten(), torch.tensor([-1, -0.6, 1]))


def flipped(data, first, count):
    """Which of these samples are mirrored."""
    images = torch.tensor([[0, 255]], dtype=torch.uint8).expand(count, 1, 2, 2)
    found = data.on_after_batch_transfer(Batch(images, torch.zeros(count, dtype=torch.int64), first), 0).images
    assert torch.equal(found[:, :, 0], found[:, :, 1]) and torch.equal(
        found.sort(3).values[0, 0, 0], torch.tensor([-1.0, 1])
    )
    return found[:, 0, 0, 0] == 1


def test_flips_depend_on_seed_and_sample_number_alone():
    whole = flipped(numbered(flip=True), 0, 2000)
    split = torch.cat([flipped(numbered(flip=True), 0, 700), flipped(numbered(flip=True, rank=1), 700, 1300)])
    assert torch.equal(whole, split)
    assert not torch.equal(whole, flipped(numbered(flip=True, seed=4), 0, 2000))
    assert abs(whole.double().mean() - 0.5) < 4 * 0.5 / 2000**0.5


def test_nothing_is_flipped_unasked_or_outside_training():
    assert not flipped(numbered(flip=False), 0, 100).any()
    assert not flipped(numbered(flip=True, training=False), 0, 100).any()


def test_padding_is_black_on_every_side():
    data = numbered(resolution=6, padding=2)
    (batch,) = first(data.train_dataloader(), 1)
    assert batch.images.shape == (4, 1, 6, 6) and batch.images.dtype == torch.uint8
    inside = batch.images[:, :, 2:4, 2:4]
    assert torch.equal(inside, batch.labels.to(torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2))
    assert batch.images.int().sum() == inside.int().sum()


@pytest.mark.parametrize("ranks", [1, 3])
def test_reference_images_are_the_first_training_images_shared_by_the_processes(ranks):
    data = numbered(resolution=4, padding=1)
    parts = [torch.cat(list(data.reference(7, rank, ranks))) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), data.train.read(slice(0, 7)))
    assert torch.cat(parts).shape == (7, 1, 4, 4)
    assert sum(len(part) for part in data.reference(1000, 0, 1)) == COUNT


def test_identity_names_the_pixels_and_their_padding():
    assert numbered().identity == numbered(seed=9, batch=2).identity
    assert numbered().identity != numbered(resolution=4, padding=1).identity
    other = Numbered(1, 2, 15, 4, 3)
    other.load = lambda: tuple((images + np.uint8(1), labels) for images, labels in Numbered.load(other))
    other.setup()
    assert other.identity != numbered().identity


# What is refused


@pytest.mark.parametrize(("options", "asked"), [({"channels": 3}, "3 x 2 x 2"), ({"resolution": 8}, "1 x 8 x 8")])
def test_images_of_other_sizes_are_refused_with_the_settings_that_ask_for_them(options, asked):
    with pytest.raises(ValueError, match=rf"the images are 1 x 2 x 2, but data.channels=.* ask for {asked}"):
        numbered(**options)


def test_a_batch_that_processes_cannot_share_is_refused():
    data = numbered(batch=10)
    data.check_split(5)
    with pytest.raises(ValueError, match="batch=10 does not divide among 4 processes; choose a multiple of 4"):
        data.check_split(4)
    with pytest.raises(ValueError, match="does not divide among 3"):
        numbered(rank=0, ranks=3, batch=10).train_dataloader()
    numbered(batch=10, share_unit=2).check_split(4)
    with pytest.raises(ValueError, match=r"6 processes cannot share batch=10 in parts of data\.share_unit=2; start"):
        numbered(batch=10, share_unit=2).check_split(6)
    with pytest.raises(ValueError, match="micro_batch=1; set that to null"):
        numbered(batch=10, share_unit=2).check_split(4, 1)
    with pytest.raises(ValueError, match=r"data\.share_unit=4 does not divide batch=10"):
        numbered(batch=10, share_unit=4)


def test_a_micro_batch_that_does_not_divide_the_share_is_refused():
    data = numbered(batch=12)
    data.check_split(2, 3)
    data.check_split(2, None)
    with pytest.raises(
        ValueError, match="micro_batch=4 does not divide the 6 images that each process has of batch=12"
    ):
        data.check_split(2, 4)


@pytest.mark.parametrize("held_out", [0, 10_000, -1])
def test_held_out_must_leave_images_on_both_sides(composed, held_out):
    data = instantiate(composed("data=fashion10k", f"data.held_out={held_out}").data)
    with pytest.raises(ValueError, match=f"data.held_out={held_out} must lie between 1 and 9999"):
        data.setup()


# The embedded sets


@pytest.fixture(scope="module", params=["fashion10k", "emoji32"])
def embedded(request, tmp_path_factory, compose_in):
    data = instantiate(compose_in(tmp_path_factory.mktemp("data"), f"data={request.param}").data)
    data.setup()
    return data


def test_embedded_sets_have_the_shapes_that_their_configuration_says(embedded):
    (batch,) = first(_with_trainer(embedded).train_dataloader(), 1)
    assert batch.images.shape[1:] == (embedded.channels, embedded.resolution, embedded.resolution)
    assert embedded.resolution == 32 and batch.images.dtype == torch.uint8
    counts = {"fashion10k": (9000, 1000, 1), "emoji32": (3291, 495, 3)}[embedded.name]
    assert (len(embedded.train), len(embedded.held_out), embedded.channels) == counts


def test_embedded_sets_have_images_of_every_class_on_both_sides(embedded):
    for images in (embedded.train, embedded.held_out):
        assert sorted(set(images.labels.tolist())) == list(range(embedded.classes))


def test_embedded_sets_come_with_their_licence(embedded):
    text = (ROOT / "src" / "data" / f"{embedded.name}.LICENSE").read_text()
    assert "MIT License" in text or "Apache License" in text
    assert "Copyright" in text


def test_no_held_out_image_is_trained_on(embedded):
    trained = {image.tobytes() for image in embedded.train.images}
    assert sum(image.tobytes() in trained for image in embedded.held_out.images) == 0


def test_embedded_reference_images_are_training_images(embedded):
    reference = torch.cat(list(embedded.reference(250, 0, 1)))
    assert torch.equal(reference, embedded.train.read(slice(0, 250)))
    assert reference.float().std() > 20  # images, not blanks


def _with_trainer(data):
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, training=True)
    return data


# Folders of images


def folder(path, tmp_path, **options):
    shared = dict(channels=3, resolution=4, classes=0, batch=2, seed=0)
    data = Folder(**{"path": str(path), "held_out": 1, "cache": str(tmp_path / "cache")} | shared | options)
    data.prepare_data()
    data.setup()
    return data


def paint(path, colour, mode="RGB", size=(4, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def all_of(data):
    """Every image and label, sorted by the image's first pixel."""
    images = np.concatenate([data.train.images, data.held_out.images])
    labels = np.concatenate([data.train.labels, data.held_out.labels])
    places = images[:, :, 0, 0].astype(int).sum(1).argsort()
    return images[places], labels[places]


@pytest.fixture
def classes(tmp_path):
    """Two classes of two images, one of them deeper, in four formats."""
    pictures = tmp_path / "pictures"
    paint(pictures / "ants" / "a.png", (10, 10, 10))
    paint(pictures / "ants" / "deeper" / "b.bmp", (60, 60, 60))
    paint(pictures / "bees" / "a.PPM", (110, 110, 110))
    paint(pictures / "bees" / "c.webp", (160, 160, 160))
    (pictures / "bees" / "notes.txt").write_text("not an image")
    return pictures


def test_sub_folders_are_labels(classes, tmp_path):
    images, labels = all_of(folder(classes, tmp_path, classes=2))
    assert images.shape == (4, 3, 4, 4)
    assert abs(images[:, 0, 0, 0].astype(int) - [10, 60, 110, 160]).max() <= 3  # webp loses a little
    assert labels.tolist() == [0, 0, 1, 1]


def test_images_without_sub_folders_all_have_label_zero(tmp_path):
    for value in (0, 100, 200):
        paint(tmp_path / "flat" / f"{value}.png", (value,) * 3)
    assert all_of(folder(tmp_path / "flat", tmp_path))[1].tolist() == [0, 0, 0]


def test_more_sub_folders_than_classes_are_refused(classes, tmp_path):
    """A class-conditional network has embeddings for data.classes labels only."""
    paint(classes / "cats" / "a.png", (250, 250, 250))
    with pytest.raises(ValueError, match=r"3.*data\.classes=2"):
        folder(classes, tmp_path, classes=2)


@pytest.mark.parametrize(
    ("mode", "colour", "in_colour", "in_grey"),
    [
        ("RGB", (200, 100, 50), (200, 100, 50), 124),  # 0.299 r + 0.587 g + 0.114 b
        ("L", 90, (90, 90, 90), 90),
        ("RGBA", (200, 100, 50, 255), (200, 100, 50), 124),
        ("RGBA", (200, 100, 50, 0), (255, 255, 255), 255),  # transparent: white
        ("RGBA", (0, 0, 0, 128), (127, 127, 127), 127),
        ("LA", (0, 128), (127, 127, 127), 127),
        ("I;16", 90 * 257, (90, 90, 90), 90),
    ],
)
def test_grey_colour_and_transparent_images_become_what_the_network_sees(tmp_path, mode, colour, in_colour, in_grey):
    for name in "ab":
        paint(tmp_path / "pictures" / f"{name}.png", colour, mode)
    found = folder(tmp_path / "pictures", tmp_path).train.images[0]
    assert abs(found.astype(int).reshape(3, -1).T - in_colour).max() <= 1
    found = folder(tmp_path / "pictures", tmp_path, channels=1).train.images[0]
    assert found.shape == (1, 4, 4)
    assert abs(found.astype(int) - in_grey).max() <= 1


def test_images_are_cropped_to_the_centre_and_resized(tmp_path):
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:12], wide[:, 12:16] = 200, 100  # the centred square; black on both sides of it
    for name in "ab":
        (tmp_path / "pictures").mkdir(exist_ok=True)
        Image.fromarray(wide).save(tmp_path / "pictures" / f"{name}.png")
    image = folder(tmp_path / "pictures", tmp_path, resolution=6, padding=1).train
    assert image.images.shape == (1, 3, 4, 4)
    assert abs(image.images[0, 0, :, 0].astype(int) - 200).max() <= 12
    assert abs(image.images[0, 0, :, 3].astype(int) - 100).max() <= 12
    assert image.read(slice(0, 1)).shape == (1, 3, 6, 6)


def test_photographs_are_turned_upright(tmp_path):
    """Cameras write how they were held beside the pixels (EXIF orientation 6: turn clockwise by a quarter)."""
    lying = np.zeros((4, 4, 3), np.uint8)
    lying[:, :2] = 255  # left half white; upright, the top half
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in "ab":
        (tmp_path / "pictures").mkdir(exist_ok=True)
        Image.fromarray(lying).save(tmp_path / "pictures" / f"{name}.png", exif=exif)
    image = folder(tmp_path / "pictures", tmp_path).train.images[0, 0]
    assert (image[:2] == 255).all() and (image[2:] == 0).all()


def damage(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_a_truncated_image_is_named_with_the_way_out(classes, tmp_path):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(classes / "bees" / "torn.png")
    damage(classes / "bees" / "torn.png")
    with pytest.raises(ValueError, match=r"bees/torn\.png cannot be read .*data\.unreadable=skip"):
        folder(classes, tmp_path)


def test_a_truncated_image_is_skipped_and_named_where_that_was_asked_for(classes, tmp_path, capsys):
    (classes / "ants" / "empty.png").write_bytes(b"")
    (classes / "ants" / "text.jpg").write_text("not a photograph")
    data = folder(classes, tmp_path, unreadable="skip")
    assert len(data.train) + len(data.held_out) == 4
    said = "".join(capsys.readouterr().out.split())
    assert "skipped" in said and "empty.png" in said and "text.jpg" in said


def test_folders_without_readable_images_say_so(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no images"):
        folder(tmp_path / "empty", tmp_path)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        folder(tmp_path / "nowhere", tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"x")
    with pytest.raises(ValueError, match="none of the 1 images"):
        folder(tmp_path / "broken", tmp_path, unreadable="skip")


def test_wrong_settings_of_a_folder_name_the_right_ones(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path is not set; name the folder of images with data\.path="):
        Folder(None, 1, str(tmp_path), channels=3, resolution=4, classes=0, batch=2, seed=0)
    with pytest.raises(ValueError, match=r"data\.unreadable=ignore is unknown; it may be error or skip"):
        folder(tmp_path, tmp_path, unreadable="ignore")


def test_the_decoded_array_is_used_again(classes, tmp_path, monkeypatch):
    once = folder(classes, tmp_path)
    monkeypatch.setattr(Folder, "_decode", lambda *_: pytest.fail("decoded again"))
    again = folder(classes, tmp_path)
    assert np.array_equal(again.train.images, once.train.images)
    assert np.array_equal(again.train.labels, once.train.labels)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("change", ["pixels", "new file", "resolution", "channels"])
def test_the_decoded_array_is_renewed_when_something_changed(classes, tmp_path, change):
    folder(classes, tmp_path)
    options = {}
    if change == "pixels":
        paint(classes / "ants" / "a.png", (30, 30, 30))
        os.utime(classes / "ants" / "a.png", ns=(time.time_ns(), time.time_ns() + 1))
    elif change == "new file":
        paint(classes / "ants" / "z.png", (35, 35, 35))
    else:
        options = {"resolution": {"resolution": 8}, "channels": {"channels": 1}}[change]
    images, _ = all_of(folder(classes, tmp_path, **options))
    expected = {"pixels": (4, 3, 4, 4), "new file": (5, 3, 4, 4), "resolution": (4, 3, 8, 8), "channels": (4, 1, 4, 4)}
    assert images.shape == expected[change]
    assert images[0, 0, 0, 0] == (30 if change == "pixels" else 10)


def test_held_out_files_are_chosen_by_their_names_and_stay_when_others_come(tmp_path):
    """The order of a folder's files is the order of their names' digests, so it is alike on every machine."""
    for value in range(20):
        paint(tmp_path / "pictures" / f"{value}.png", (value * 10,) * 3)
    before = folder(tmp_path / "pictures", tmp_path, held_out=5).held_out.images[:, 0, 0, 0].tolist()
    moved = (tmp_path / "pictures").rename(tmp_path / "elsewhere")
    assert folder(moved, tmp_path, held_out=5).held_out.images[:, 0, 0, 0].tolist() == before
    assert before != sorted(before)


def test_symbolic_links_to_folders_are_followed(classes, tmp_path):
    gathered = tmp_path / "gathered"
    gathered.mkdir()
    (gathered / "ants").symlink_to(classes / "ants")
    (gathered / "bees").symlink_to(classes / "bees")
    assert all_of(folder(gathered, tmp_path, classes=2))[1].tolist() == [0, 0, 1, 1]


# torchvision's sets, from files written by hand


def write_idx(path, array):
    """The format of MNIST: two zeros, the type (8: unsigned bytes), the dimensions, their sizes (big-endian), data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


def digits(root, name, half, count, first):
    images = np.arange(count, dtype=np.uint8)[:, None, None] + np.zeros((1, 28, 28), np.uint8) + np.uint8(first)
    write_idx(root / name / "raw" / f"{half}-images-idx3-ubyte", images)
    write_idx(root / name / "raw" / f"{half}-labels-idx1-ubyte", (np.arange(count, dtype=np.uint8) % 10))


@pytest.mark.parametrize(("choice", "name"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_torchvisions_idx_files_are_read(composed, tmp_path, choice, name):
    digits(tmp_path / "data", name, "train", 12, first=0)
    digits(tmp_path / "data", name, "t10k", 5, first=100)
    data = instantiate(composed(f"data={choice}").data)
    data.setup()
    assert data.train.images.shape == (12, 1, 28, 28) and data.held_out.images.shape == (5, 1, 28, 28)
    assert data.train.images[:, 0, 3, 3].tolist() == list(range(12))
    assert data.held_out.images[:, 0, 0, 0].tolist() == list(range(100, 105))
    assert data.train.labels.tolist() == [*range(10), 0, 1]
    padded = data.train.read(slice(5, 6))
    assert padded.shape == (1, 1, 32, 32) and padded[0, 0, 0, 0] == 0 and padded[0, 0, 2, 2] == 5


def test_idx_files_that_are_cut_off_are_not_whole(composed, tmp_path):
    digits(tmp_path / "data", "MNIST", "train", 12, first=0)
    digits(tmp_path / "data", "MNIST", "t10k", 5, first=100)
    damage(tmp_path / "data" / "MNIST" / "raw" / "t10k-images-idx3-ubyte")
    with pytest.raises(ValueError, match=r"MNIST is not in .*, or not whole"):
        instantiate(composed("data=mnist").data).setup()


def test_packed_idx_files_are_not_enough(composed, tmp_path):
    digits(tmp_path / "data", "MNIST", "train", 12, first=0)
    digits(tmp_path / "data", "MNIST", "t10k", 5, first=100)
    for file in (tmp_path / "data" / "MNIST" / "raw").iterdir():
        file.with_suffix(".gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    with pytest.raises(ValueError, match="train-images-idx3-ubyte and its three siblings"):
        instantiate(composed("data=mnist").data).setup()


@pytest.mark.parametrize("choice", ["mnist", "fashion_mnist", "cifar10"])
def test_missing_torchvision_sets_say_what_to_put_where(composed, tmp_path, choice):
    data = instantiate(composed(f"data={choice}").data)
    with pytest.raises(ValueError) as refused:
        data.setup()
    said = str(refused.value)
    assert f"is not in {tmp_path / 'data'}" in said and "paths.data=" in said
    assert ("cifar-10-batches-py/" if choice == "cifar10" else "train-images-idx3-ubyte") in said


def test_other_sets_of_torchvision_have_no_reader():
    with pytest.raises(ValueError, match=r"data\.name=SVHN has no reader; there is FashionMNIST, MNIST, CIFAR10"):
        TorchVision("SVHN", "data", channels=3, resolution=32, classes=10, batch=2, seed=0)
