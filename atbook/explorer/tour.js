/* The tour: the book's experiment in six steps. Each shows one scene, what the teacher sees, the map, and the student.

A step is a state of the explorer and a few sentences. What a reader changes in it is in the address,
"#tour=3&token=6": the step, and what differs from how the step begins. A page of the book may show some of the steps. */
"use strict";
(() => {
  const { el, svg, controls, percent, placeOf, rowOf, softmax, likeliest, drawTour, tourSquare } = Explorer;
  const L = 4, N = 17, GRID = 4, LAYER = L - 1; // the last layer: there the class token fetches the glyph
  const FULL = Explorer.FULL.toString(36); // the largest share that can be painted, as an address has it
  /* Steps: what is shown, what it says, and which of a state's parts a reader can change with which control. */
  const STEPS = [
    {
      title: "Without a teacher", state: { world: "match", model: "scratch" },
      says: "The student cuts the scene into 16 cells and adds an empty slot, the class token, which looks at the cells, collects what it needs and gives the answer. This student learned from 1,000 scenes and their answers, without a teacher: its class token looks at wrong cells, and it guesses.",
    },
    {
      title: "Give it the teacher's maps", state: { world: "match", model: "copy" },
      says: "This student learned from the same 1,000 scenes, but a teacher makes its attention maps, which say how much the class token looks at each cell. The teacher was never told the name of a shape. It shows the student where to look; the student has learned to name what is there.",
    },
    {
      title: "Show the teacher a twin", state: { world: "match", model: "copy", maps: "twin", twin: "routing" },
      says: "Now the teacher looks at a twin of the scene: the same places and colours, but other shapes. So its map can say where to look, and nothing true about the shape. The student sees its own scene and is still right. Choose the other twin below, and its map leads the student to a wrong cell.",
      twins: true,
    },
    {
      title: "A second world: Find", state: { world: "find", model: "copy", maps: "twin", twin: "routing" },
      says: "Again the teacher looks at a twin, and both maps point at the right cell. But how strongly they point depends on the shape that the teacher sees there (red frames), and the student has learned to read that: it names the twin's shape. So the map carries a message. With the students of Find this happens in one scene of four; with those of Match, the world before, hardly ever.",
      twins: true,
    },
    {
      title: "Make the map yourself", state: { world: "match", model: "copy", maps: "painted" },
      says: "You are the teacher now. Choose a cell of the map (with the mouse, or with Tab and the arrow keys): in the last of its four layers, the student's class token then looks only there. The student names the shape that you point at, whatever the question is.",
      paints: true,
    },
    {
      title: "Break it", state: { world: "find", model: "copy", blur: 1 },
      says: "Teacher and student see the same scene, but it is blurred, and neither learned from blurred scenes. The teacher's class token now looks mostly at itself, so the map points at no cell, and the student is wrong. Take the blur away until it is right. Then try the other two changes: which of the three does it survive?",
      dials: [
        ["blur", "Blur the scene", 0, 1.5, 0.1], ["hue_shift", "Change all colours", 0, 0.5, 1 / 24],
        ["decoy", "Light three corners elsewhere", 0, 1, 0.1],
      ],
    },
  ];
  const TWIN_CHOICES = [["scene", "the student's scene"], ["routing", "a twin: same places, other shapes"], ["message", "a twin: same shape, other places"]];

  // --- A state of the explorer from a step, and what a reader changed ---

  /* changes: {seed, token, twin, cell, decoy, blur, hue_shift}, those that differ from how the step begins. */
  function stateOf(number, changes) {
    const { cell, ...others } = changes, begins = STEPS[number - 1];
    const state = { ...Explorer.begin(begins.state.world), ...begins.state, ...others };
    if (begins.twins && changes.twin === "scene") Object.assign(state, { twin: "routing", maps: null });
    if (begins.paints) {
      const to = cell ?? awayFrom(Explorer.draw(state.world, state.seed)); // it begins where it must go wrong
      state.maps = "teacher,teacher,teacher,painted";
      state.paint = `${LAYER}.0.${Array.from({ length: N }, (_, j) => (j === to + 1 ? FULL : "0")).join("")}`;
    }
    if (state.maps && !state.maps.includes(",")) state.maps = Array(L).fill(state.maps).join(",");
    return state;
  }

  /* A cell of another shape than the glyph in question: the next one that is not the key. */
  function awayFrom(scene) {
    for (let by = 1; by < 16; by++) {
      const cell = (scene.cell + by) % 16;
      if (cell !== scene.key && scene.cells[cell].shape !== Explorer.label(scene)) return cell;
    }
    return scene.cell;
  }

  /* "#tour=3&token=6" as {number, changes}, or null where the address asks for something else. */
  function readAddress(address) {
    const asked = Object.fromEntries(new URLSearchParams(address.replace(/^#/, "")));
    const number = +asked.tour;
    if (!(Number.isInteger(number) && number >= 1 && number <= STEPS.length)) return null;
    const within = (low, high, whole) => text => text !== "" && +text >= low && +text <= high && (!whole || Number.isInteger(+text));
    const rules = {
      seed: within(0, 2 ** 31, true), token: within(0, N - 1, true), cell: within(0, 15, true),
      twin: text => TWIN_CHOICES.some(([name]) => name === text),
      ...Object.fromEntries((STEPS[number - 1].dials ?? []).map(([name, , low, high]) => [name, within(low, high)])),
    };
    const good = Object.entries(asked).filter(([name, text]) => rules[name]?.(text));
    return { number, changes: Object.fromEntries(good.map(([name, text]) => [name, name === "twin" ? text : +text])) };
  }

  const writeAddress = (number, changes) =>
    "#" + [`tour=${number}`, ...Object.entries(changes).map(([name, value]) => `${name}=${value}`)].join("&");

  // --- What the student answers, in words ---

  /* scene: the student's; seen: the teacher's; cell: the one that a reader points at, or null. */
  function verdictOf(probabilities, scene, seen, cell, shapes) {
    const most = likeliest(probabilities), label = Explorer.label(scene), theirs = Explorer.label(seen);
    const answers = `The student answers ${shapes[most]} (${percent(probabilities[most])})`, truth = shapes[label];
    if (cell === scene.key) return `${answers}. You point at the key, which has no shape to name.`;
    if (cell !== null) {
      const pointed = scene.cells[cell].shape;
      if (most !== pointed) return `${answers}, and you point at ${shapes[pointed]}: here it does not follow you.`;
      const asked = cell === scene.cell ? "It is what the question asks for, too: right." : `(The question asks for another: the target is ${truth}.)`;
      return `${answers}: that is what you point at. ${asked}`;
    }
    const sameCell = seen !== scene && seen.cell === scene.cell && theirs !== label;
    if (most === label) return `${answers}: right${sameCell ? `, although the teacher sees ${shapes[theirs]} there` : ""}.`;
    if (sameCell && most === theirs) return `${answers}: that is what the teacher sees there. In the student's own scene it is ${truth}.`;
    return `${answers}: wrong, it is ${truth}.`;
  }

  // --- The block in a page ---

  /* The tour inside an element. numbers: of its steps, such as [3, 4]; place: where its address is kept. */
  function openTour(root, content, numbers, place) {
    const models = Explorer.modelsIn(content), { select, field } = controls();
    let { number, changes } = at(place.read());
    root.classList.add("explorer", "explorer-tour");

    function at(address) {
      const asked = readAddress(address);
      return asked && numbers.includes(asked.number) ? asked : { number: numbers[0], changes: {} };
    }

    function go(to) {
      number = to;
      changes = {};
      show();
    }

    function change(patch) {
      changes = { ...changes, ...patch };
      show();
    }

    const title = el("p", { className: "explorer-title" });
    title.setAttribute("role", "heading");
    title.setAttribute("aria-level", "3");
    const asks = el("p", { className: "tour-asks" }), says = el("p", { className: "tour-says" });
    const verdict = el("p", { className: "explorer-says" });
    verdict.setAttribute("aria-live", "polite");
    const drawing = svg("svg", { class: "tour-drawing", role: "group" });
    const swatch = name => el("span", { className: `tour-swatch tour-swatch-${name}` });
    const looker = el("span");
    const key = el("p", { className: "tour-key" },
      el("span", {}, swatch("lit"), looker), el("span", {}, swatch("target"), "the target, which the question asks for"),
      el("span", {}, swatch("map"), "map: the bluer, the more it looks there"));
    const answers = el("ol", { className: "tour-answers" });
    const answering = el("div", { className: "tour-answering" }, el("p", { className: "explorer-name" }, "The student's answer"), answers);
    const back = el("button", { type: "button", onclick: () => go(numbers[numbers.indexOf(number) - 1]) }, "Back");
    const next = el("button", { type: "button", className: "explorer-main", onclick: () => go(numbers[numbers.indexOf(number) + 1]) }, "Next");
    const other = el("button", { type: "button", onclick: () => change({ seed: stateOf(number, changes).seed + 1, cell: undefined }) }, "Another scene");
    const free = el("a", {}, "Change everything yourself");
    const twin = select("The teacher looks at", TWIN_CHOICES, value => change({ twin: value }));
    const dials = STEPS.flatMap(step => step.dials ?? []).map(([name, text, min, max, step]) => {
      const input = el("input", { type: "range", min, max, step, oninput: () => change({ [name]: +input.value }) }), output = el("output");
      return { name, input, output, max, field: field(text, input, " ", output) };
    });
    const row = (...children) => el("div", { className: "explorer-row" }, ...children);
    const dialRow = row(...dials.map(dial => dial.field));
    root.replaceChildren(title, asks, says, el("div", { className: "tour-stage" }, drawing, verdict, answering, key),
      twin.field, dialRow, row(back, next, other, free));

    /* Cells that can be chosen: one stop for Tab, arrow keys from there. part: where they are drawn. */
    function buttons(where, part, count, chosen, nameOfButton, choose) {
      return Array.from({ length: count }, (_, i) => {
        const token = count === N ? i : i + 1;
        const button = tourSquare(part, token, {
          class: "tour-button", role: "button", tabindex: i === chosen ? 0 : -1, "aria-label": nameOfButton(i),
          "aria-pressed": String(i === chosen), "data-at": `${where}-${i}`,
        });
        const take = to => {
          choose(to);
          drawing.querySelector(`[data-at="${where}-${to}"]`).focus(); // it was drawn anew
        };
        button.onclick = () => take(i);
        button.onkeydown = event => {
          const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -GRID, ArrowDown: GRID, Enter: 0, " ": 0 }[event.key];
          if (by === undefined) return;
          event.preventDefault();
          take(Math.min(count - 1, Math.max(0, i + by)));
        };
        return button;
      });
    }

    function show() {
      const step = STEPS[number - 1], state = stateOf(number, changes), scene = Explorer.sceneOf(state);
      const chosen = models.choices(state), found = models.answer(state, state.model, chosen), token = state.token;
      const twinned = chosen[0] === "twin", painted = Boolean(step.paints), own = chosen[0] === "own";
      const rowOfMaps = maps => rowOf(maps[LAYER], "mean", token), shares = rowOfMaps(found.maps);
      const compared = twinned ? rowOfMaps(models.answer(state, state.model, Explorer.everyLayer("teacher")).maps) : null;
      const targets = compared && [shares, compared].map(row => row[scene.cell + 1]);
      const seen = twinned ? Explorer.twinOf(state, scene) : scene;
      const index = numbers.indexOf(number), cell = painted ? state.paint.split(".")[2].indexOf(FULL) - 1 : null;
      title.textContent = numbers.length > 1 ? `${index + 1} of ${numbers.length}. ${step.title}` : step.title;
      asks.textContent = `The question: ${Explorer.ASKS[state.world]}`;
      says.textContent = step.says;
      const inCell = i => `${content.hues[scene.cells[i].hue]} ${content.shapes[scene.cells[i].shape]}`;
      const inToken = j => (j === 0 ? "class token" : `${placeOf(j - 1)}, ${j - 1 === scene.key ? "the key" : inCell(j - 1)}`);
      const pictureOf = (name, one) => ({ title: name, bytes: Explorer.render(one, state), target: one.cell });
      const kind = painted ? "painted" : twinned ? "compared" : "plain", whose = own ? "the student's map" : "the teacher's map";
      drawTour(drawing, {
        kind, shares, token, compared, mapTitle: { painted: "your map", compared: "map of the twin" }[kind] ?? whose,
        weights: compared ? [`target: ${percent(targets[0])} above,`, `${percent(targets[1])} here`] : [],
        teacher: own || painted ? null : pictureOf(twinned ? "teacher: a twin" : "teacher", seen), nobody: painted ? "you" : "no teacher",
        student: pictureOf(twinned ? "student: the scene" : "student", scene),
      }, at => [
        ...buttons("student", at.student, N, token, j => `${inToken(j)}: ${percent(shares[j])} of the attention`, j => change({ token: j })),
        ...(painted ? buttons("map", at.map, N - 1, cell, i => `look only at ${placeOf(i)}, ${inCell(i)}`, i => change({ cell: i })) : []),
      ]);
      const probabilities = softmax(found.logits), label = Explorer.label(scene);
      const to = likeliest(shares), looks = to === 0 ? "at itself" : `at ${placeOf(to - 1)}`;
      const which = token === 0 ? "The class token" : `The token of ${placeOf(token - 1)}`;
      const beside = compared ? `; the target gets ${percent(targets[0])} in this map, and ${percent(targets[1])} in the map of the student's own scene` : "";
      drawing.setAttribute("aria-label", `${which} looks most ${looks}, ${percent(shares[to])}${beside}`);
      looker.textContent = `${token === 0 ? "the class token" : "the chosen cell's token"} looks here`;
      verdict.textContent = verdictOf(probabilities, scene, seen, cell, content.shapes);
      answers.replaceChildren(...probabilities.map((share, i) => el("li", { className: i === label ? "explorer-right-answer" : "" },
        Explorer.icon(i), el("span", {}, content.shapes[i] + (i === label ? " ✓" : "")),
        el("span", { className: "explorer-bar" }, el("span", { style: `width: ${100 * share}%` })), el("span", {}, percent(share)))));
      twin.field.hidden = !step.twins;
      twin.menu.value = changes.twin ?? "routing";
      dialRow.hidden = !step.dials;
      for (const { name, input, output, max } of dials) {
        input.value = state[name];
        output.textContent = percent(state[name] / max);
        input.setAttribute("aria-valuetext", output.textContent);
      }
      back.disabled = index === 0;
      next.disabled = index === numbers.length - 1;
      free.href = place.play + Explorer.addressOf(state, models);
      place.write(writeAddress(number, Object.fromEntries(Object.entries(changes).filter(([, value]) => value !== undefined))));
    }

    place.moved(() => {
      ({ number, changes } = at(place.read()));
      show();
    });
    show();
  }

  const ALL = STEPS.map((_, i) => i + 1);
  /* On the play page the address is the page's own, where it is the tour's; elsewhere it is nobody's. */
  const ADDRESS_BAR = {
    read: () => location.hash,
    write: address => (location.hash === "" || readAddress(location.hash)) && history.replaceState(null, "", address),
    moved: call => addEventListener("hashchange", () => readAddress(location.hash) && call()),
    play: "",
  };

  /* All tours of a page. play: the address of the play page, from this one. */
  function openTours(content, play) {
    for (const root of document.querySelectorAll(".tour-here")) {
      const numbers = root.dataset.steps?.split(" ").map(Number) ?? ALL;
      const apart = { read: () => "", write: () => {}, moved: () => {}, play };
      openTour(root, content, numbers, play === "" ? ADDRESS_BAR : apart);
    }
  }

  Object.assign(Explorer, { openTours });
  if (document.getElementById("explorer")) openTours(globalThis.ExplorerWeights, "");
})();
