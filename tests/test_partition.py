"""A partition: its files and what is refused of them, the data of one expert, and what comes later."""

import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image

from src import partition_files as files
from src import store as stores
from src.clustering import nearest
from src.datamodules.base import ImageData
from src.datamodules.toys import Stacked
from src.features import KINDS, Features
from src.partition import Partition
from src.results import prepare

COUNT, HELD_OUT, K = 240, 60, 4


class Shades(ImageData):
    """Noisy images (1, 4, 4) of four shades, brighter by `lighter`; the label is the shade."""

    def __init__(self, lighter=0, **options):
        super().__init__(**dict(channels=1, resolution=4, classes=0, batch=8, seed=3, val_batch=5) | options)
        self.lighter = lighter

    def load(self):
        draw = np.random.default_rng(5)
        labels = draw.choice(4, COUNT + HELD_OUT, p=[0.4, 0.3, 0.2, 0.1])
        noise = draw.integers(0, 12, (COUNT + HELD_OUT, 1, 4, 4))
        images = (60 * labels[:, None, None, None] + noise + self.lighter).astype(np.uint8)
        return (images[:COUNT], labels[:COUNT]), (images[COUNT:], labels[COUNT:])


def shades(**options):
    data = Shades(**options)
    data.setup()
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, training=True)
    return data


def made(data=None, **options):
    data = data or shades()
    settings = dict(clusters=K, fine=16) | options
    return Partition.create(data.identity, data.train, data.held_out, Features("pixels"), **settings)


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    """A folder, and a file system that is none, with a partition in it."""
    place = str(tmp_path / "store") if request.param == "folder" else f"memory://{tmp_path.name}"
    made().save(place)
    return place


@pytest.fixture
def folder(tmp_path):
    made().save(str(tmp_path))
    return tmp_path


# Its files


def test_what_was_saved_is_loaded(store):
    before, after = made(), Partition.load(store)
    assert after.card == before.card and after.base == before.base and after.clusters == K
    (known,) = after.card["sets"]
    assert (known["images"], known["held_out"], known["centroids"]) == (COUNT, HELD_OUT, 16)
    for key, value in before.arrays[known["data"]].items():
        found = after.arrays[known["data"]][key]
        assert found.dtype == value.dtype and np.array_equal(found, value)
    assert after.sizes.tolist() == known["sizes"] and after.sizes.sum() == COUNT
    assert known["imbalance"] == pytest.approx(np.abs(after.sizes / (COUNT / K) - 1).max())


def test_the_lineage_is_the_hash_of_the_arrays(store):
    base = Partition.load(store).base
    assert base == made().base and base == files.hashlib.sha256(stores.get(store, "partition.npz")).hexdigest()
    assert base != made(seed=1).base and base != made(balance="capacity").base


def test_shades_are_the_clusters_also_of_held_out_images():
    data = shades()
    partition = made(data)
    labels, held_out = partition.of(data.identity, data.train, data.held_out)
    pairs = {*zip(data.train.labels.tolist(), labels.tolist(), strict=True)}
    pairs |= {*zip(data.held_out.labels.tolist(), held_out.tolist(), strict=True)}
    assert len(pairs) == 4 and len({k for _, k in pairs}) == 4
    assert np.array_equal(partition.assign(data.held_out), held_out)


@pytest.mark.parametrize("balance", ["capacity", "sinkhorn"])
def test_balanced_sizes_are_within_their_bounds(balance):
    partition = made(balance=balance, bounds=(0.95, 1.05))
    assert partition.sizes.min() >= 57 and partition.sizes.max() <= 63 and made().sizes.max() > 80


def damaged(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def changed(path, **entries):
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def lacking(path, key):
    card = json.loads(path.read_text())
    del card[key]
    path.write_text(json.dumps(card))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "partition.json").unlink(), "has no partition.json; make one with python prepare.py"),
        (lambda f: (f / "partition.npz").unlink(), "partition.npz is missing; make another"),
        (lambda f: damaged(f / "partition.npz"), "partition.npz does not have the hash of partition.json"),
        (lambda f: (f / "partition.json").write_text("{"), "partition.json cannot be read"),
        (lambda f: changed(f / "partition.json", schema=0), "is of schema 0, not 2; make another"),
        (lambda f: changed(f / "partition.json", base="0"), "a base that is not the hash of partition.npz"),
        (lambda f: changed(f / "partition.json", clusters=3), "has other clusters than its sizes say"),
        (lambda f: changed(f / "partition.json", sets=[]), "is not whole: it lacks .*; make another"),
        (lambda f: lacking(f / "partition.json", "kind"), "is not whole: it lacks 'kind'; make another"),
    ],
)
def test_files_that_are_not_what_they_should_be_are_refused(folder, spoil, said):
    spoil(folder)
    with pytest.raises(ValueError, match=said):
        shades(partition=str(folder))


def test_sizes_that_the_card_does_not_tell_are_refused(folder):
    card = json.loads((folder / "partition.json").read_text())
    card["sets"][0]["sizes"].reverse()
    changed(folder / "partition.json", **card)
    with pytest.raises(ValueError, match=r"partition\.npz has other sizes than partition\.json says"):
        Partition.load(str(folder))


def test_a_process_that_dies_while_writing_leaves_no_partition(tmp_path, monkeypatch):
    def dies(store, name, data):
        if name == "partition.json":
            raise KeyboardInterrupt
        stores.put(store, name, data)

    monkeypatch.setattr(files, "put", dies)
    with pytest.raises(KeyboardInterrupt):
        made().save(str(tmp_path))
    assert not files.exists(str(tmp_path))
    monkeypatch.undo()
    made().save(str(tmp_path))
    assert Partition.load(str(tmp_path)).clusters == K and sorted(p.suffix for p in tmp_path.iterdir()) == [
        ".json",
        ".npz",
    ]


def test_images_that_are_not_the_partitions_are_refused(folder):
    with pytest.raises(ValueError, match=r"does not know these images .*later=assign"):
        shades(partition=str(folder), lighter=1)
    data, partition = shades(), Partition.load(str(folder))
    data.train.images = data.train.images[::-1]
    with pytest.raises(ValueError, match="of 240 training and 60 held-out images in another order"):
        partition.of(data.identity, data.train, data.held_out)
    with pytest.raises(ValueError, match="in another order"):
        partition.of(data.identity, data.held_out, data.held_out)


def test_features_that_have_changed_are_noticed(folder, monkeypatch):
    monkeypatch.setitem(KINDS, "pixels", lambda dino: lambda images: images.float().flatten(1) / 255)
    with pytest.raises(
        ValueError, match=r"\d+ of 64 images belong to other clusters .* features \(pixels\) have changed"
    ):
        shades(partition=str(folder))


# The data of one expert


def test_the_clusters_of_a_batch_are_those_of_its_images(folder):
    whole, data = shades(), shades(partition=str(folder))
    assert data.identity == whole.identity
    for ours, theirs in zip(data.val_dataloader(), whole.val_dataloader(), strict=True):
        assert torch.equal(ours.images, theirs.images) and theirs.clusters is None
        assert ours.clusters.dtype == torch.int64
    of_shade = {}
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for batch, _ in zip(loader, range(12), strict=False):
            for label, cluster in zip(batch.labels.tolist(), batch.clusters.tolist(), strict=True):
                assert of_shade.setdefault(label, cluster) == cluster
    assert sorted(of_shade.values()) == [0, 1, 2, 3]
    assert torch.equal(batch.narrow(1, 3).clusters, batch.clusters[1:3]) and theirs.narrow(1, 3).clusters is None
    data.classes = 0
    again = data.on_after_batch_transfer(batch, 0)
    assert torch.equal(again.clusters, batch.clusters)


def test_clusters_together_are_all_images_and_share_their_memory(folder):
    whole = shades()
    experts = [shades(partition=str(folder), cluster=k) for k in range(K)]
    for name in ("train", "held_out"):
        rows = np.concatenate([getattr(e, name).rows for e in experts])
        assert sorted(rows.tolist()) == list(range(len(getattr(whole, name))))
        for expert in experts:
            part = getattr(expert, name)
            assert torch.equal(part.read(slice(2, 5)), getattr(whole, name).read(part.rows[2:5]))
            assert np.array_equal(part.labels, getattr(whole, name).labels[part.rows])
    data = shades(partition=str(folder))
    part = data.train.only(2)
    assert part.images is data.train.images and len(data.train) == COUNT
    assert len({e.identity for e in [whole, *experts]}) == K + 1


def test_an_expert_sees_each_of_its_images_once_in_a_pass_and_no_other(folder):
    data = shades(partition=str(folder), cluster=1, batch=4)
    count = len(data.train)
    batches = [next(it) for it in [iter(data.train_dataloader())] for _ in range(3 * count // 4)]
    images = torch.cat([b.images for b in batches])[: 2 * count].view(2, count, -1)
    expected = data.train.read(slice(0, count)).flatten(1)
    for one_pass in images:
        assert sorted(map(tuple, one_pass.tolist())) == sorted(map(tuple, expected.tolist()))
    assert not torch.equal(images[0], images[1])
    assert torch.cat([b.clusters for b in batches]).unique().tolist() == [1]
    assert torch.equal(torch.cat(list(data.reference(10, 0, 1))).flatten(1), expected[:10])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_expert_goes_on_where_it_stopped(folder, workers):
    whole, resumed = (shades(partition=str(folder), cluster=1, workers=w) for w in (0, workers))
    resumed.position = 16
    ahead, again = iter(whole.train_dataloader()), iter(resumed.train_dataloader())
    batches = [next(ahead) for _ in range(4)][2:]
    for theirs in batches:
        ours = next(again)
        assert ours.first == theirs.first
        for key in ("images", "labels", "clusters"):
            assert torch.equal(getattr(ours, key), getattr(theirs, key))
    images = pickle.loads(pickle.dumps(resumed.train))
    assert torch.equal(images[range(4)].images, resumed.train[range(4)].images)


def test_triples_of_images_are_partitioned_as_any_others(tmp_path):
    options = dict(
        name="fashion10k", held_out=1000, channels=3, resolution=32, classes=1000, batch=4, seed=0, padding=2
    )
    options |= dict(count=200, count_held_out=80)
    whole = Stacked(**options)
    whole.setup()
    made(whole, clusters=2, fine=8).save(str(tmp_path))
    for k in range(2):
        data = Stacked(**options, partition=str(tmp_path), cluster=k)
        data.setup()
        batch = data.train[range(3)]
        chosen = [data.train._row(n) for n in range(3)]
        assert (
            torch.equal(batch.images, whole.train.read(data.train.rows[chosen])) and batch.clusters.tolist() == [k] * 3
        )
        assert data.identity != whole.identity


@pytest.mark.parametrize("cluster", [-1, 4])
def test_clusters_that_do_not_exist_are_refused(folder, cluster):
    with pytest.raises(ValueError, match=f"data.cluster={cluster} does not exist; the partition has 0 to 3"):
        shades(partition=str(folder), cluster=cluster)
    with pytest.raises(ValueError, match=r"data\.cluster=1 is of no partition; set data\.partition"):
        Shades(cluster=1)


# What comes later


@pytest.mark.parametrize("new", [False, True])
def test_later_images_extend_the_partition_and_leave_its_lineage(store, new):
    before, later = Partition.load(store), shades(lighter=7)
    partition = Partition.load(store)
    partition.extend(later.identity, later.train, later.held_out, new=new)
    partition.save(store)
    after = Partition.load(store)
    assert after.base == before.base and after.clusters == K + new
    assert after.sizes.sum() == 2 * COUNT and after.card["sets"][0] == before.card["sets"][0]
    labels, held_out = (
        shades(partition=store, lighter=7).train.clusters,
        shades(partition=store, lighter=7).held_out.clusters,
    )
    if new:
        assert set(labels) == set(held_out) == {K} and len(shades(partition=store, lighter=7, cluster=K).train) == COUNT
        assert len(after.centroids()[0]) == 20 and after.assign(later.train).tolist().count(K) > COUNT / 2
    else:
        centroids, coarse = before.centroids()
        assert np.array_equal(labels, coarse[nearest(before.features(later.train.read, COUNT), centroids)])
        assert np.array_equal(held_out, before.assign(later.held_out))
    old = shades(partition=store)  # the first images are known as they were
    assert np.array_equal(old.train.clusters, before.arrays[old.identity]["labels"])
    with pytest.raises(ValueError, match=r"knows these images .* already"):
        after.extend(later.identity, later.train, later.held_out, new=new)


class Both(Shades):
    """The images that came later and the first ones, of which others are held out."""

    def load(self):
        both = [Shades(lighter=lighter).load() for lighter in (1, 0)]
        images, labels = (np.concatenate([part[i] for one in both for part in one]) for i in range(2))
        order = np.random.default_rng(9).permutation(len(images))
        images, labels = images[order], labels[order]
        return (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])


def test_images_that_are_known_keep_the_cluster_whose_expert_learned_them(store):
    """So that a head, which sees new and old images, learns which are the new expert's."""
    first, later, both = shades(), shades(lighter=1), Both()
    partition = Partition.load(store)
    partition.extend(later.identity, later.train, later.held_out, new=True)
    partition.save(store)
    both.setup()
    partition.extend(both.identity, both.train, both.held_out, new=False)
    partition.save(store)
    found = Partition.load(store)
    labels = dict.fromkeys((i.tobytes() for data in (later.train, later.held_out) for i in data.images), K)
    for images, name in ((first.train.images, "labels"), (first.held_out.images, "held_out")):
        labels |= dict(zip((i.tobytes() for i in images), found.arrays[first.identity][name].tolist(), strict=True))
    for images, name in ((both.train.images, "labels"), (both.held_out.images, "held_out")):
        assert found.arrays[both.identity][name].tolist() == [labels[i.tobytes()] for i in images]
    nearest_alone = found.assign(both.train)
    assert (nearest_alone != found.arrays[both.identity]["labels"]).sum() > 20
    everything = np.bincount(list(labels.values()), minlength=K + 1)
    never = np.bincount([labels[i.tobytes()] for i in both.held_out.images if i.tobytes() not in _seen(first, later)])
    assert found.sizes.sum() == everything.sum() - never.sum() and found.sizes[K] >= COUNT


def _seen(*sets):
    return {i.tobytes() for data in sets for i in data.train.images}


def test_images_of_another_size_cannot_be_assigned(folder):
    larger = Shades()
    larger.resolution = 8
    larger.load = lambda: [(images.repeat(2, 2).repeat(2, 3), labels) for images, labels in Shades().load()]
    larger.setup()
    with pytest.raises(ValueError, match="these images give 64 numbers to compare them by, those of the partition 16"):
        Partition.load(str(folder)).extend(larger.identity, larger.train, larger.held_out, new=False)


def test_a_cluster_without_images_of_this_data_set_is_refused(folder):
    partition, later = Partition.load(str(folder)), shades(lighter=7)
    partition.extend(later.identity, later.train, later.held_out, new=True)
    partition.save(str(folder))
    with pytest.raises(ValueError, match="cluster 4 has no training images in this data set"):
        shades(partition=str(folder), cluster=4)


# The command


FASHION = ["task=partition", "data=fashion10k", "clusters=3", "fine=24"]


def test_the_command_makes_a_partition_that_training_data_reads(composed, tmp_path, capsys):
    store = tmp_path / "store"
    prepare(composed(*FASHION, f"store={store}", "balance=capacity", command="prepare"))
    said = capsys.readouterr().out
    assert "9000 images in 3 clusters, 1000 held-out ones beside them" in said and f"{store}/partition.png" in said
    assert sorted(p.name for p in store.iterdir()) == ["partition.json", "partition.npz", "partition.png"]
    assert Image.open(store / "partition.png").size == (16 * 34 + 2, 3 * 34 + 2)
    before = (store / "partition.json").stat().st_mtime_ns
    prepare(composed(*FASHION, f"store={store}", "balance=capacity", command="prepare"))  # the same again
    assert (store / "partition.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"has another partition .* later=assign or later=new to extend it"):
        prepare(composed(*FASHION, f"store={store}", command="prepare"))

    def named(where, cluster=2):
        return composed(f"+data.partition={where}", f"+data.cluster={cluster}").name

    name = named(store)
    moved = store.rename(tmp_path / "moved")
    assert named(moved) == name  # it depends on the partition, and not on where that lies
    prepare(composed(*FASHION, f"store={store}", "later=null", command="prepare"))
    assert len({name, named(store), named(moved, 1), composed().name}) == 4
    data = instantiate(composed(f"+data.partition={moved}", "+data.cluster=2").data)
    data.setup()
    assert 2700 <= len(data.train) <= 3300


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["data=null"], "needs the images: name them with data="),
        (["clusters=0"], "clusters=0 of 9000 images are impossible"),
        (["balance=some"], "balance=some does not exist; there is none, capacity, sinkhorn"),
        (["features=some"], "features=some does not exist; there is pixels, efflite0, dino"),
        (["features=dino"], "dino=None is no folder of DINOv2"),
        (["imbalance=error"], r"a cluster's size is \d+ % off the mean, more than 15 %: balance=capacity"),
        (["imbalance=x"], "imbalance=x does not exist; choose warn or error"),
        (["later=x"], "later=x does not exist; choose assign or new"),
        (["later=new"], "has no partition.json; make one"),
        (["bounds=[0.9]", "balance=capacity"], r"bounds=\[0.9\] must be a share of the mean up to 1, and one from 1"),
        (["bounds=[1.1,1.2]", "balance=capacity"], r"bounds=\[1.1, 1.2\] must be a share of the mean up to 1"),
    ],
)
def test_mistakes_are_told_in_a_sentence_and_nothing_is_written(composed, tmp_path, asked, said):
    words = [w for w in FASHION if w.partition("=")[0] not in {a.partition("=")[0] for a in asked}]
    words += [a for a in asked if a != "data=null"]
    with pytest.raises(ValueError, match=said) as error:
        prepare(composed(*words, f"store={tmp_path / 'store'}", command="prepare"))
    assert "\n" not in str(error.value) and not (tmp_path / "store").exists()
