/* The tour: the book's experiment in six steps. Each shows one scene, what the teacher sees, the map, and the student.

A step is a state of the explorer and a sentence. What a reader changes in it is in the address, "#tour=3&token=6":
the step, and what differs from how the step begins. A page of the book may show some of the steps alone. */
"use strict";
(() => {
  const { el, svg, controls, percent, placeOf, capital, rowOf, softmax, likeliest, nameOf } = Explorer;
  const L = 4, N = 17, GRID = 4, LAYER = L - 1; // the last layer: there the class token fetches the glyph
  const FULL = "k"; // the largest share that can be painted, as a digit
  /* Steps: what is shown, what it says, and which of a state's parts a reader can change with which control. */
  const STEPS = [
    {
      title: "Scratch fails", state: { world: "match", model: "scratch" },
      says: "Which shape has the glyph in the key's colour (the key is the framed square)? This student learned from 1,000 labelled scenes, without a teacher: its class token looks at the wrong places, and it guesses.",
    },
    {
      title: "Give it the teacher's maps", state: { world: "match", model: "copy" },
      says: "A student of the same size and the same labels, but in every layer it uses the attention maps of a teacher, which has never seen a label. It is told where to look, and has learned to see what is there.",
    },
    {
      title: "Let the teacher look at a twin", state: { world: "match", model: "copy", maps: "twin", twin: "routing" },
      says: "Now the teacher looks at a twin of the scene: the same places and colours, other shapes. Its map can say where, and nothing true about what. The student sees its own scene, and is still right. With a twin of the same shape in another place, the map leads it away.",
      twins: true,
    },
    {
      title: "The same in Find", state: { world: "find", model: "copy", maps: "twin", twin: "routing" },
      says: "In Find the glyph in question has white corners. The teacher looks at a twin again, and its map points at the right cell; but this student names the shape that the twin has there, which it has never seen. The maps carried a message, and the student reads it.",
      twins: true,
    },
    {
      title: "Paint the map yourself", state: { world: "match", model: "copy", maps: "painted" },
      says: "No teacher now: you are it. Choose a cell of the map, and the class token looks there and nowhere else (in the last layer). The student names what is in that cell.",
      paints: true,
    },
    {
      title: "Break it", state: { world: "find", model: "copy", blur: 1 },
      says: "Teacher and student see the same image again, and it is blurred: neither has ever met such an image. Turn the blur down until the student is right. Then turn the colours, or light a false mark (three white corners where the true one has four): which of the three changes does the student survive?",
      dials: [["blur", "blur", 0, 1.5, 0.1], ["hue_shift", "turned colours", 0, 0.5, 1 / 24], ["decoy", "false mark", 0, 1, 0.1]],
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

  // --- The drawing: teacher, map, student ---

  const SIDE = 150, MAP = 96, GAP = 42, TOP = 40; // of the drawing's units; 390 pixels are 0.8 of one each
  const LEFT = { teacher: 0, map: SIDE + GAP, student: SIDE + MAP + 2 * GAP };
  const WIDE = LEFT.student + SIDE, TALL = TOP + SIDE + 4;
  const MAP_TOP = TOP + (SIDE - MAP) / 2;

  /* The middle of a token in one of the three, x and y; the class token is the strip above the cells. */
  function middle(where, token) {
    const [side, top] = where === "map" ? [MAP, MAP_TOP] : [SIDE, TOP];
    if (token === 0) return [LEFT[where] + side / 2, top - 9];
    const cell = token - 1, size = side / GRID;
    return [LEFT[where] + (cell % GRID + 0.5) * size, top + (Math.floor(cell / GRID) + 0.5) * size];
  }

  function square(where, token, attributes) {
    const [x, y] = middle(where, token), side = where === "map" ? MAP : SIDE, size = side / GRID;
    return token === 0
      ? svg("rect", { x: LEFT[where], y: y - 7, width: side, height: 14, ...attributes })
      : svg("rect", { x: x - size / 2, y: y - size / 2, width: size, height: size, ...attributes });
  }

  function picture(where, bytes) {
    const canvas = document.createElement("canvas");
    Explorer.paint(canvas, bytes);
    return svg("image", {
      href: canvas.toDataURL(), x: LEFT[where], y: TOP, width: SIDE, height: SIDE, preserveAspectRatio: "none", class: "explorer-pixels",
    });
  }

  /* What is drawn: shares (N) of the chosen token, whose map it is, the scenes' bytes, and buttons over the student's
     tokens (and over the map, where it is painted). */
  function draw(drawing, { shares, token, teacherSees, studentSees, fromTeacher, painted, names }, buttons) {
    const most = Math.max(...shares.slice(1)), lit = shares.map((share, j) => [share, j]).filter(([share]) => share > 0.08);
    const path = (from, to, share) => {
      const [[x1, y1], [x2, y2]] = [from, to], bend = (x2 - x1) / 2;
      return svg("path", { d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`, class: "tour-flow", "stroke-width": 1 + 4 * share });
    };
    const dimmed = where => shares.flatMap((share, j) => (j === 0 ? [] : [square(where, j, { class: "tour-dim", opacity: 0.6 * (1 - share / most) })]));
    const looked = where => lit.map(([, j]) => square(where, j, { class: "tour-lit" }));
    const title = (where, text) => svg("text", { x: LEFT[where] + (where === "map" ? MAP : SIDE) / 2, y: where === "map" ? MAP_TOP - 22 : 13, "text-anchor": "middle" }, text);
    const teacher = teacherSees ? [picture("teacher", teacherSees), ...dimmed("teacher"), ...looked("teacher")]
      : [svg("rect", { x: 0, y: TOP, width: SIDE, height: SIDE, class: "tour-nobody" }),
        svg("text", { x: SIDE / 2, y: TOP + SIDE / 2 + 5, "text-anchor": "middle" }, painted ? "you" : "no teacher")];
    drawing.replaceChildren(
      title("teacher", names.teacher), title("map", names.map), title("student", names.student),
      ...teacher,
      picture("student", studentSees), ...dimmed("student"), ...looked("student"),
      ...shares.map((share, j) => square("map", j, { class: "tour-share", "fill-opacity": share / Math.max(...shares) })),
      svg("rect", { x: LEFT.map, y: MAP_TOP, width: MAP, height: MAP, class: "tour-edge" }),
      ...(fromTeacher || painted ? lit.map(([share, j]) => path(fromTeacher ? middle("teacher", j) : [SIDE + 4, TOP + SIDE / 2], middle("map", j), share)) : []),
      ...lit.map(([share, j]) => path(middle("map", j), middle("student", j), share)),
      svg("text", { x: LEFT.student + SIDE / 2, y: TOP - 6, "text-anchor": "middle", class: "tour-class" }, "class token"),
      square("student", token, { class: "tour-token" }),
      ...buttons);
  }

  // --- The block in a page ---

  /* The tour inside an element. numbers: of its steps, such as [3, 4]; place: where its address is kept. */
  function openTour(root, content, numbers, place) {
    const models = Explorer.modelsIn(content), { select } = controls();
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
    const says = el("p", { className: "tour-says" });
    const verdict = el("p", { className: "explorer-says" });
    verdict.setAttribute("aria-live", "polite");
    const drawing = svg("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, class: "tour-drawing", role: "group" });
    const answers = el("ol", { className: "tour-answers" });
    const back = el("button", { type: "button", onclick: () => go(numbers[numbers.indexOf(number) - 1]) }, "Back");
    const next = el("button", { type: "button", className: "explorer-main", onclick: () => go(numbers[numbers.indexOf(number) + 1]) }, "Next");
    const other = el("button", { type: "button", onclick: () => change({ seed: stateOf(number, changes).seed + 1, cell: undefined }) }, "Another scene");
    const free = el("a", {}, "Change everything yourself");
    const twin = select("The teacher looks at", TWIN_CHOICES, value => change({ twin: value }));
    const dials = STEPS.flatMap(step => step.dials ?? []).map(([name, text, min, max, step]) => {
      const input = el("input", { type: "range", min, max, step, oninput: () => change({ [name]: +input.value }) });
      return { name, input, field: el("label", { className: "explorer-field" }, text, input) };
    });
    const row = (...children) => el("div", { className: "explorer-row" }, ...children);
    const dialRow = row(...dials.map(({ field }) => field));
    const paintedSays = el("p", {}, "Choose a cell of the map with the mouse, or with Tab and the arrow keys.");
    root.replaceChildren(title, says, drawing, verdict, twin.field, dialRow, paintedSays, answers,
      row(back, next, other, free));

    /* Cells that can be chosen: one stop for Tab, arrow keys from there. */
    function buttons(where, count, chosen, nameOfButton, choose) {
      return Array.from({ length: count }, (_, i) => {
        const token = count === N ? i : i + 1;
        const button = square(where, token, {
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
      const chosen = models.choices(state), found = models.answer(state, state.model, chosen);
      const twinned = chosen[0] === "twin", painted = Boolean(step.paints), own = chosen[0] === "own";
      const token = state.token, shares = rowOf(found.maps[LAYER], "mean", token);
      const seen = twinned ? Explorer.twinOf(state, scene) : scene;
      const index = numbers.indexOf(number), cell = painted ? state.paint.split(".")[2].indexOf(FULL) - 1 : null;
      title.textContent = numbers.length > 1 ? `${index + 1} of ${numbers.length}. ${step.title}` : step.title;
      says.textContent = step.says;
      const inCell = i => `${content.hues[scene.cells[i].hue]} ${content.shapes[scene.cells[i].shape]}`;
      const inToken = j => (j === 0 ? "class token" : `${placeOf(j - 1)}, ${j - 1 === scene.key ? "the key" : inCell(j - 1)}`);
      draw(drawing, {
        shares, token, fromTeacher: !own && !painted, painted,
        teacherSees: own || painted ? null : Explorer.render(seen, state), studentSees: Explorer.render(scene, state),
        names: { teacher: own || painted ? "" : twinned ? "teacher: a twin" : "teacher", map: own ? "its own map" : "map", student: "student" },
      }, [
        ...buttons("student", N, token, j => `${inToken(j)}: ${percent(shares[j])} of the attention`, j => change({ token: j })),
        ...(painted ? buttons("map", 16, cell, i => `look only at ${placeOf(i)}, ${inCell(i)}`, i => change({ cell: i })) : []),
      ]);
      const probabilities = softmax(found.logits), label = Explorer.label(scene), most = likeliest(probabilities);
      const to = likeliest(shares), looks = to === 0 ? "at itself" : `at ${placeOf(to - 1)}`;
      const who = token === 0 ? "The class token" : `The token of ${placeOf(token - 1)}`;
      drawing.setAttribute("aria-label", `${who} looks most ${looks}, ${percent(shares[to])}`);
      const truth = content.shapes[label], said = content.shapes[most], theirs = content.shapes[Explorer.label(seen)];
      const why = most === label ? "right" : `wrong, it is ${truth}`;
      const leak = twinned && most !== label && most === Explorer.label(seen) ? ` The twin has a ${theirs} there.` : "";
      verdict.textContent = `${capital(nameOf(state.model))} answers ${said} (${percent(probabilities[most])}): ${why}.${leak}`;
      answers.replaceChildren(...probabilities.map((share, i) => el("li", { className: i === label ? "explorer-right-answer" : "" },
        Explorer.icon(i), el("span", {}, content.shapes[i] + (i === label ? " ✓" : "")),
        el("span", { className: "explorer-bar" }, el("span", { style: `width: ${100 * share}%` })), el("span", {}, percent(share)))));
      twin.field.hidden = !step.twins;
      twin.menu.value = changes.twin ?? "routing";
      dialRow.hidden = !step.dials;
      for (const { name, input } of dials) input.value = state[name];
      paintedSays.hidden = !painted;
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

  Object.assign(Explorer, { STEPS, tourState: stateOf, openTours });
  if (document.getElementById("explorer")) openTours(globalThis.ExplorerWeights, "");
})();
