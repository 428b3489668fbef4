"""The page of `look` as a reader uses it: mouse, keyboard, address, names, a narrow page."""

import re

import pytest
import torch

from atlib import look, walk
from atrun.looking import Preparation
from atrun.looking.preparation import prepare
from tests.looking.reading import bound, content_of, rows_of

PREPARATION = Preparation((32, 48), (0.5,) * 3, (0.25,) * 3)
ROWS, COLUMNS, FIRST = 4, 6, 3  # a class token and two registers


@pytest.fixture(scope="module")
def pixels():
    return torch.randint(256, (3, 32, 48), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


@pytest.fixture
def vit(small_vit):
    return small_vit(img_size=(32, 48), reg_tokens=2)


@pytest.fixture
def opened(visit, vit, pixels, tmp_path):
    """A function that saves and opens the page, at an address: of one model, or of others."""

    def go(address="", width=1000, models=None, **options):
        shown = look(models or {"It": vit}, pixels, preparation=PREPARATION, **options)
        return visit(shown.save(tmp_path / "page.html").as_uri() + address, width)

    return go


@pytest.fixture
def maps(vit, pixels):
    """Every layer's map, (layers, H, N, N)."""
    with torch.no_grad():
        seen = walk(vit, prepare(pixels, PREPARATION).pixels).layers
    return torch.stack([layer.map[0] for layer in seen])


def says(page):
    return page.inner_text(".look-says")


def stage(page):
    return page.get_by_role("application")


def name_of(token):
    prefix = ["class token", "register 0", "register 1"]
    row, column = divmod(token - FIRST, COLUMNS)
    return prefix[token] if token < FIRST else f"patch row {row}, column {column}"


def assert_says(page, row, token, where):
    """The sentence names the three keys that get most of a row, (N,), but for what the quantiser hides."""
    found = re.fullmatch(r"(.+): gives (\S+) to (.+?); (\S+) to (.+?); (\S+) to (.+)\.", says(page))
    assert found, says(page)
    query, *given = found.groups()
    assert query == f"{name_of(token).capitalize()}, {where}"
    row = row.double().numpy()
    names = ["itself" if key == token else name_of(key) for key in range(len(row))]
    most = sorted(range(len(row)), key=lambda key: -row[key])
    for share, name, expected in zip(given[0::2], given[1::2], most):
        key = names.index(name)
        assert abs(row[key] - row[expected]) <= bound(row)[key] + bound(row)[expected]
        rounding = 0.005 if row[key] >= 0.1 else 0.05 * row[key]
        assert abs(float(share) - row[key]) <= bound(row)[key] + rounding


def test_a_click_on_the_photograph_chooses_a_patch(opened, maps):
    page = opened("#layer=1&head=2")
    for row, column in ((0, 0), (3, 5), (2, 1)):
        box = stage(page).bounding_box()
        at = {"x": (column + 0.5) / COLUMNS * box["width"], "y": (row + 0.5) / ROWS * box["height"]}
        stage(page).click(position=at)
        token = FIRST + row * COLUMNS + column
        assert_says(page, maps[1, 2, token], token, "layer 1, head 2")
        chosen = page.locator(".look-main .look-chosen").bounding_box()
        assert chosen["x"] == pytest.approx(box["x"] + column / COLUMNS * box["width"], abs=1)
        assert chosen["y"] == pytest.approx(box["y"] + row / ROWS * box["height"], abs=1)


def test_the_keyboard_alone_is_enough(opened, maps):
    page = opened()
    assert_says(page, maps[2].mean(0)[0], 0, "layer 2, mean of all heads")
    stage(page).focus()
    stage(page).press("ArrowRight")  # from the class token into the picture: the patch in its middle
    token = FIRST + 2 * COLUMNS + 3
    assert_says(page, maps[2].mean(0)[token], token, "layer 2, mean of all heads")
    for key, step in {"ArrowLeft": -1, "ArrowUp": -COLUMNS, "ArrowDown": COLUMNS}.items():
        stage(page).press(key)
        token += step
        assert_says(page, maps[2].mean(0)[token], token, "layer 2, mean of all heads")
    for _ in range(COLUMNS):
        stage(page).press("ArrowRight")  # it stops at the edge
    token = FIRST + 2 * COLUMNS + 5
    stage(page).press("PageUp")
    assert_says(page, maps[1].mean(0)[token], token, "layer 1, mean of all heads")
    stage(page).press("Home")
    assert_says(page, maps[1].mean(0)[0], 0, "layer 1, mean of all heads")
    page.get_by_label("Head", exact=True).select_option("0")
    page.get_by_label("Layer", exact=True).select_option("2")
    page.get_by_role("button", name="register 1").press("Enter")
    assert_says(page, maps[2, 0, 2], 2, "layer 2, head 0")


def test_the_small_pictures_choose_layer_and_head(opened, maps):
    page = opened()
    page.get_by_role("button", name="layer 0, head 1:").click()
    assert_says(page, maps[0, 1, 0], 0, "layer 0, head 1")
    page.locator(".look-grid button[tabindex='0']").press("ArrowDown")
    assert_says(page, maps[1, 1, 0], 0, "layer 1, head 1")
    page.get_by_role("button", name="rollout through layer 2").click()  # the layer alone
    assert_says(page, maps[2, 1, 0], 0, "layer 2, head 1")


def colours(page, cell):
    """The colour of a patch of the map over the picture."""
    drawn = f"e => [...e.getContext('2d').getImageData({cell[1]}, {cell[0]}, 1, 1).data]"
    return page.eval_on_selector(".look-main canvas", drawn)


def test_scales_are_labelled_and_mean_what_they_say(opened, vit, pixels):
    (model,) = content_of(look({"It": vit}, pixels, preparation=PREPARATION).html())["models"]
    rows = rows_of(model)

    def top(address):
        page = opened(address)
        return float(page.locator(".look-main .look-scale span").nth(2).inner_text()), page

    patches = rows[1, 2, 0][FIRST:]
    assert top("#layer=1&head=2&colours=one")[0] == 1
    said, page = top("#layer=1&head=2&colours=row")
    assert said == pytest.approx(patches.max(), abs=0.005)
    cell = divmod(int(patches.argmax()), COLUMNS)
    assert colours(page, cell) == [252, 253, 191, 255], "the largest has the brightest colour"
    _, page = top("#layer=1&head=2&colours=one")
    linear = colours(page, cell)
    page = opened("#layer=1&head=2&colours=one")  # read twice, a canvas complains
    page.get_by_label("as roots").check()
    assert sum(colours(page, cell)[:3]) > sum(linear[:3]), "roots make small shares brighter"
    assert page.locator(".look-main .look-scale span").nth(1).inner_text() == "0.25"


def test_features_and_gradient_stand_beside(opened, vit, pixels):
    page = opened("#layer=1&token=2.3&map=100")
    titles = page.locator(".look-beside .look-caption").all_inner_texts()
    after = [f"{name} after layer 1" for name in ("Similarity", "Features", "Norms")]
    assert titles == ["Rollout, layers 0 to 1", *after, "Gradient, layer 1"]
    ((rows, _),) = look({"It": vit}, pixels, preparation=PREPARATION).models.values()
    drawn = "e => [...e.getContext('2d').getImageData(3, 2, 1, 1).data]"
    colour = page.locator(".look-beside canvas").nth(2).evaluate(drawn)
    assert colour == [*rows.panels.components[1, 2 * COLUMNS + 3].tolist(), 255]
    norms = rows.panels.norms[1, FIRST:]
    high = [i for i in range(len(norms)) if norms[i] > 2 * norms.median()]
    assert page.locator(".look-beside .look-marked").count() == len(high)


def test_several_pictures_share_a_page(visit, vit, pixels, tmp_path):
    shown = look({"It": vit}, {"first": pixels, "second": 255 - pixels}, preparation=PREPARATION)
    page = visit(shown.save(tmp_path / "page.html").as_uri() + "#layer=1&head=2&token=class+token")
    said, photograph = says(page), page.get_attribute(".look-main img", "src")
    page.get_by_label("Photograph", exact=True).select_option("second")
    assert page.get_attribute(".look-main img", "src") != photograph
    with torch.no_grad():
        seen = walk(vit, prepare(255 - pixels, PREPARATION).pixels).layers
    assert_says(page, seen[1].map[0, 2, 0], 0, "layer 1, head 2")
    assert says(page) != said


def test_the_state_is_in_the_address(opened):
    page = opened("#token=1.4&layer=0&head=1&colours=row&root=1&map=30")
    before = says(page)
    assert before.startswith("Patch row 1, column 4, layer 0, head 1")
    page.get_by_role("button", name="register 0").click()
    again = opened(page.evaluate("location.hash"))
    assert says(again) == says(page) != before
    assert again.get_by_label("as roots").is_checked()
    assert again.get_by_label("Map over photograph").input_value() == "30"
    page.evaluate("location.hash = '#token=9.99&layer=77&head=x'")  # the nearest there is, or as it opens
    page.wait_for_function("document.querySelector('.look-says').textContent.includes('row 3, column 5')")
    assert "layer 2, mean of all heads" in says(page)


def test_two_models_side_by_side(opened, vit, small_vit, pixels):
    other = small_vit(1, img_size=(32, 48), depth=2, num_heads=2, class_token=False, global_pool="avg")
    models = {"A & <b>": vit, "</script>B": other}
    page = opened(models=models)
    first, second = says(page).split("\n")
    assert first.startswith("A & <b>: Class token, layer 2")
    # the other has no class token and no third layer: it shows what is nearest, and says so
    assert second.startswith("</script>B: Patch row 2, column 3, layer 1")
    box = stage(page).nth(1).bounding_box()
    stage(page).nth(1).click(position={"x": 0.1 * box["width"], "y": 0.9 * box["height"]})
    first, second = says(page).split("\n")
    assert "Patch row 3, column 0" in first and "Patch row 3, column 0" in second


def test_every_patch_can_be_chosen_where_whole_rows_do_not_fit(opened, maps):
    page = opened("#layer=1&head=2&token=2.3", megabytes=0.02)
    assert "2 x 3 of 4 x 6 patches the whole rows" in page.inner_text(".look-notes")
    assert says(page).startswith("Patch row 2, column 3, layer 1, head 2, means of blocks of 2 x 2 patches: ")
    box = stage(page).bounding_box()
    stage(page).hover(position={"x": 4.5 / COLUMNS * box["width"], "y": 1.5 / ROWS * box["height"]})
    read = page.inner_text(".look-main .look-read")
    block = maps[1, 2, FIRST + 2 * COLUMNS + 3, FIRST:].unflatten(0, (ROWS, COLUMNS))[0:2, 4:6]
    assert read.startswith("to row 1, column 4: ")
    assert float(read.rpartition(" ")[2]) == pytest.approx(block.mean().item(), abs=0.005)
    stage(page).press("ArrowUp")
    assert says(page).startswith("Patch row 1, column 3, layer 1, head 2: "), "this one is whole"


def test_it_is_no_wider_than_a_phone_and_everything_has_a_name(opened, small_vit):
    page = opened(width=390, models={"deep": small_vit(img_size=(32, 48), embed_dim=64, num_heads=16)})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    controls = page.locator(".look :is(button, select, input, [role=application])")
    for index in range(controls.count()):
        said = "e => e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent"
        assert controls.nth(index).evaluate(said).strip()
    assert page.get_attribute(".look-says", "aria-live") == "polite"


def test_several_blocks_share_a_page_of_a_book(visit, vit, pixels, tmp_path):
    """As in a notebook, where the same output may also be there twice."""
    one, two = (look({name: vit}, pixels, preparation=PREPARATION) for name in ("one", "two"))
    blocks = "\n".join((one.html(), two.html(), one.html()))
    file = tmp_path / "book.html"
    file.write_text(f'<!doctype html><html lang="en"><meta charset="utf-8"><title>t</title>{blocks}</html>')
    page = visit(file.as_uri())
    assert page.locator(".look-main").count() == 3
    page.get_by_role("button", name="register 0").nth(1).click()
    said = page.locator(".look-says").all_inner_texts()
    assert [text.split(",")[0] for text in said] == ["Class token", "Register 0", "Class token"]
    assert page.evaluate("location.hash") == "", "the book's own address is left alone"
