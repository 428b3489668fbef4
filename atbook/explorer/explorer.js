/* The explorer: a scene, a model, and whose attention maps it uses; what it answers is seen at once.

A control changes the state, `show` draws all of it anew, and undo goes back to the state before. The page and the
notebook's widget differ in where the models come from and where the address is kept, and in nothing else. */
"use strict";
(() => {
  const { BITMAPS, WORLD, TWINS, RENDERINGS, NAMES, CHOICES, DIALS, FULL, TYPICAL } = Explorer;
  const { el, fill, controls, paint, icon, percent, placeOf, capital, nameOf, rowOf, softmax, likeliest } = Explorer;
  const { everyLayer, sceneOf, twinOf, paintedRows, modelsIn, readState, addressOf } = Explorer;
  const L = 4, N = 17, GRID = 4;
  const MEASURED = 500, FIRST_MEASURED = 2_000_000; // scenes, from this seed on: none that "New scene" comes to
  const choiceName = choice => NAMES[choice === "teacher" ? "teacherMaps" : choice];

  // --- The page ---

  /* The explorer inside an element, with the models of `content`. place: where the address is kept, an object of
     `read()`, `write(address)` and `moved(call)`, which calls when somebody else has changed it. */
  function open(root, content, place) {
    const models = modelsIn(content), { of: modelsOf, usual, choices, answer } = models, { field, select } = controls();
    let { state, wrong } = readState(place.read(), models), last = null, before = {};
    const past = [];
    root.classList.add("explorer");

    /* kind: what is being dragged; while it is the same, it is one step for undo. */
    function change(patch, kind = null) {
      if (kind === null || kind !== last) past.push(state);
      last = kind;
      wrong = [];
      state = { ...state, ...patch };
      show();
    }

    function edit(what, cell, value) {
      const more = value === undefined ? `${what}.${cell}` : `${what}.${cell}.${value}`;
      change({ edits: [state.edits, more].filter(Boolean).join("_") });
    }

    const pairs = (names, text = nameOf) => names.map(name => [name, text(name)]);
    const world = select("World", pairs(models.worlds), value => {
      const kept = modelsOf(value).includes(state.model) ? state.model : modelsOf(value)[0];
      const beside = modelsOf(value).includes(state.beside) ? state.beside : "none";
      const seed = state.seed === TYPICAL[state.world] ? TYPICAL[value] : state.seed;
      change({ world: value, model: kept, beside, seed, edits: "" });
    });
    const chosenModel = select("Model", [], value => change({ model: value, maps: null }));
    const beside = select("Beside it", [], value => change({ beside: value }));
    const ways = [...pairs(CHOICES, choiceName), ["mixed", "layer by layer"]];
    const maps = select("Maps of all layers", ways, value => {
      if (value === "mixed") show(); // says what there is; the layers' own menus change it
      else change({ maps: everyLayer(value).join(",") });
    });
    const twinKind = select("Twin", pairs(TWINS), value => change({ twin: value }));
    const layers = Array.from({ length: L }, (_, l) => select(`Layer ${l}`, pairs(CHOICES, choiceName),
      value => change({ maps: choices(state).with(l, value).join(",") })));

    const scene = el("canvas", { className: "explorer-scene" });
    scene.setAttribute("role", "img");
    const tokens = Array.from({ length: N }, (_, token) => {
      const button = el("button", { type: "button", onclick: () => change({ token }, "token") }, el("span"));
      button.onkeydown = event => moveBy(event, token);
      return button;
    });
    tokens[0].className = "explorer-class";

    /* Arrow keys go from token to token; above the first row is the class token. */
    function moveBy(event, token) {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -GRID, ArrowDown: GRID }[event.key];
      if (!step) return;
      event.preventDefault();
      const to = token === 0 ? (step > 0 ? 1 : 0) : Math.min(N - 1, Math.max(0, token + step));
      change({ token: to }, "token");
      tokens[to].focus();
    }

    const twinScene = el("canvas", { className: "explorer-twin" });
    twinScene.setAttribute("role", "img");
    const caption = el("figcaption", {}, "The twin that its teacher sees");
    const twinFigure = el("figure", { className: "explorer-twin-figure" }, twinScene, caption);
    const numbered = names => names.map((name, i) => [i, name]);
    const shape = select("Shape", numbered(content.shapes), value => edit("shape", state.token - 1, value));
    const hue = select("Hue", numbered(content.hues), value => edit("hue", state.token - 1, value));
    const cue = el("button", { type: "button", onclick: () => edit("cue", state.token - 1) });
    const editor = el("fieldset", { className: "explorer-row" }, el("legend"), shape.field, hue.field, cue);
    /* One slider a token: what is dragged is its share of the chosen token's row, in the chosen layer, all heads. */
    const brushes = Array.from({ length: N }, (_, to) => {
      const input = el("input", { type: "range", min: 0, max: FULL, step: 1, oninput: () => drawShare(to, +input.value) });
      const output = el("output");
      return { input, output, cell: el("div", {}, input, output) };
    });
    const palette = el("div", { className: "explorer-palette" }, ...brushes.map(brush => brush.cell));
    const paintedTitle = el("p");
    const clean = el("button", { type: "button", onclick: () => setRow(null) }, "As it was");
    const sharpen = el("button", { type: "button", onclick: () => setRow(onlyNamed()) }, "Only the answer's cell");

    function onlyNamed() {
      const named = sceneOf(state).cell;
      return Array.from({ length: N }, (_, to) => (to === named + 1 ? FULL : 0));
    }

    function drawShare(to, value) {
      const row = brushes.map(brush => +brush.input.value).with(to, value);
      if (row.some(share => share > 0)) setRow(row, `paint ${to}`);
      else show(); // a row must have something to give: the slider goes back
    }

    /* A row of N digits for the chosen token and layer, or null to take it away. */
    function setRow(row, kind = null) {
      const name = `${state.layer}.${state.token}.`;
      const others = state.paint.split("_").filter(each => each && !each.startsWith(name));
      const added = row === null ? [] : [name + row.map(share => share.toString(36)).join("")];
      const chosen = row === null ? choices(state) : choices(state).with(state.layer, "painted");
      change({ paint: [...others, ...added].join("_"), maps: chosen.join(",") }, kind);
    }

    const overlay = el("input", { type: "checkbox", checked: true, onchange: () => show() });

    const multiples = Array.from({ length: L }, (_, l) => ["mean", 0, 1, 2, 3].map(head => {
      const cells = Array.from({ length: N }, () => el("i"));
      const onclick = () => change({ layer: l, head: String(head) }, "map");
      const button = el("button", { type: "button", className: "explorer-map", onclick }, ...cells);
      return { button, cells, head, l };
    }));
    const heads = ["", "mean", "head 0", "head 1", "head 2", "head 3"].map(text => el("span", {}, text));
    const table = el("div", { className: "explorer-maps" }, ...heads,
      ...multiples.flatMap((row, l) => [el("span", {}, `layer ${l}`), ...row.map(one => one.button)]));

    const answers = el("div", { className: "explorer-answers" });
    const says = el("p", { className: "explorer-says" });
    says.setAttribute("aria-live", "polite");
    const notice = el("p", { className: "explorer-notice" });
    notice.setAttribute("role", "status");
    function goBack() {
      state = past.pop();
      last = null;
      show();
    }
    const undo = el("button", { type: "button", onclick: goBack }, "Undo");
    const another = () => change({ seed: state.seed + 1, edits: "" });
    const fresh = el("button", { type: "button", onclick: another }, "New scene");

    const dials = DIALS.map(([name, min, max, step]) => {
      const oninput = () => change({ [name]: +input.value }, name);
      const input = el("input", { type: "range", min, max, step, oninput }), output = el("output");
      return { name, input, output, field: field(name.replace("_", " "), input, " ", output) };
    });
    const rendering = select("rendering", pairs(RENDERINGS, name => name), value => change({ rendering: value }));
    const trained = el("button", { type: "button", onclick: () => change({ ...WORLD }) }, "As in training");

    const progress = el("progress", { max: MEASURED, value: 0, hidden: true });
    progress.setAttribute("aria-label", "scenes answered");
    const measured = el("output", { className: "explorer-measured" });
    const measure = el("button", { type: "button", onclick: startMeasuring }, `Measure on ${MEASURED} scenes`);
    let measuring = null; // of what: a change of it ends the measurement and clears its outcome

    const trainedWorld = () => Object.keys(WORLD).every(name => state[name] === WORLD[name]);
    const measurable = () => JSON.stringify([state.world, state.model, choices(state), state.twin, state.paint,
      ...Object.keys(WORLD).map(name => state[name])]);

    /* In slices of 30 ms, so that the page stays alive. */
    function startMeasuring() {
      const what = measuring = measurable(), asked = state, chosen = choices(state);
      let done = 0, right = 0;
      measured.textContent = "";
      measure.disabled = true;
      progress.hidden = false;
      (function slice() {
        if (measuring !== what) return;
        for (const end = performance.now() + 30; done < MEASURED && performance.now() < end; done++) {
          const one = { ...asked, seed: FIRST_MEASURED + done, edits: "" };
          right += likeliest(answer(one, one.model, chosen).logits) === Explorer.label(sceneOf(one));
        }
        progress.value = done;
        if (done < MEASURED) return setTimeout(slice);
        const recorded = content.worlds[asked.world][asked.model].recorded;
        const usually = recorded !== undefined && trainedWorld() && chosen.every(choice => choice === usual(asked.world, asked.model));
        const book = usually ? ` The book's mean over seeds, on other scenes: ${(100 * recorded).toFixed(1)} %.` : "";
        measured.textContent = `${(100 * right / MEASURED).toFixed(1)} % of ${MEASURED} scenes right.${book}`;
        measure.disabled = false;
        progress.hidden = true;
      })();
    }

    const row = (...children) => el("div", { className: "explorer-row" }, ...children);
    const more = (text, ...children) => el("details", {}, el("summary", {}, text), row(...children));
    const stage = el("div", { className: "explorer-stage" }, scene,
      el("div", { className: "explorer-cells" }, ...tokens.slice(1)));
    const dimming = el("label", {}, overlay, " dim what the token does not look at");
    root.replaceChildren(
      notice,
      row(world.field, chosenModel.field, maps.field, twinKind.field, beside.field),
      row(fresh, undo, dials[0].field),
      el("div", { className: "explorer-columns" },
        el("div", { className: "explorer-left" }, tokens[0], stage, dimming, editor, twinFigure),
        el("div", { className: "explorer-right" }, says, answers, row(measure, progress, measured))),
      el("p", { className: "explorer-title" }, "Where the chosen token looks"),
      table,
      more("Paint a map", paintedTitle, palette, row(sharpen, clean)),
      more("Other maps in every layer", ...layers.map(each => each.field)),
      more("Change the world", ...dials.slice(1).map(dial => dial.field), rendering.field, trained));

    const titled = name => el("p", { className: "explorer-name" }, capital(nameOf(name)));

    function bars(name, probabilities, right, former) {
      const rows = probabilities.map((share, i) => {
        const bar = el("span", { className: "explorer-bar" }, el("span", { style: `width: ${100 * share}%` }));
        if (former) bar.append(el("b", { style: `left: ${100 * former[i]}%`, title: "before the last change" }));
        const text = el("span", {}, content.shapes[i] + (i === right ? " ✓" : ""));
        const className = i === right ? "explorer-right-answer" : "";
        return el("li", { className }, icon(i), text, bar, el("span", {}, percent(share)));
      });
      return el("section", {}, titled(name), el("ol", {}, ...rows));
    }

    /* A teacher was trained to paint the named glyph, and answers nothing else. */
    function picture(name, logits) {
      const canvas = el("canvas", { className: "explorer-twin" });
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", "What the teacher paints: the cell that it was asked for");
      paint(canvas, Uint8Array.from(logits, value => Math.min(255, Math.max(0, Math.round(255 * value)))));
      const why = "It was trained to paint the cell in question, and knows no names of shapes.";
      return el("section", {}, titled(name), canvas, el("p", {}, why));
    }

    /* What the reader sees, in words. */
    function sentence(probabilities, chosen, label) {
      const right = content.shapes[label];
      if (!probabilities) return `The teacher paints what its class token fetched. The scene's answer is ${right}.`;
      const most = likeliest(probabilities), one = new Set(chosen).size === 1;
      const maps = !one ? "maps chosen layer by layer"
        : { own: "its own maps", teacher: "its teacher's maps", twin: "its teacher's maps of a twin",
            uniform: "uniform maps", painted: "maps painted by hand" }[chosen[0]];
      const verdict = most === label ? "right" : `wrong, it is ${right}`;
      const answered = `${content.shapes[most]} (${percent(probabilities[most])})`;
      return `${capital(nameOf(state.model))} with ${maps} answers ${answered}: ${verdict}.`;
    }

    function show() {
      const names = modelsOf(state.world), chosen = choices(state);
      const drawn = sceneOf(state), label = Explorer.label(drawn);
      fill(chosenModel.menu, pairs(names));
      fill(beside.menu, [["none", "nothing"], ...pairs(names)]);
      world.menu.value = state.world;
      chosenModel.menu.value = state.model;
      beside.menu.value = state.beside;
      twinKind.menu.value = state.twin;
      rendering.menu.value = state.rendering;
      dials.find(dial => dial.name === "decoy").field.hidden = state.world === "match"; // it has no mark to imitate
      maps.menu.value = new Set(chosen).size === 1 ? chosen[0] : "mixed";
      layers.forEach(({ menu }, l) => (menu.value = chosen[l]));
      for (const { name, input, output } of dials) {
        input.value = state[name];
        output.textContent = String(Math.round(100 * state[name]) / 100);
      }
      undo.disabled = past.length === 0;
      if (measuring !== measurable()) {
        measuring = null;
        measured.textContent = "";
        progress.hidden = true;
        measure.disabled = false;
      }
      measure.hidden = state.model === "teacher";

      const found = answer(state, state.model, chosen);
      const shares = rowOf(found.maps[state.layer], state.head, state.token), largest = Math.max(...shares.slice(1));
      paint(scene, Explorer.render(drawn, state));
      const inside = Explorer.present(drawn, state).map((held, cell) => {
        const { hue, shape } = drawn.cells[cell];
        if (cell === drawn.key) return `${placeOf(cell)}, the key in ${content.hues[hue]}`;
        const marked = state.world === "find" && cell === drawn.cell ? ", marked" : "";
        return `${placeOf(cell)}, ${held ? `${content.hues[hue]} ${content.shapes[shape]}${marked}` : "empty"}`;
      });
      scene.setAttribute("aria-label", `A scene of ${NAMES[state.world]}: ${inside.join("; ")}`);
      tokens.forEach((button, token) => {
        button.setAttribute("aria-pressed", String(token === state.token));
        button.tabIndex = token === state.token ? 0 : -1; // one stop for Tab, arrows go on from there
        const what = token === 0 ? "class token" : inside[token - 1];
        button.setAttribute("aria-label", `${what}: ${percent(shares[token])} of the attention`);
        const said = token === 0 || shares[token] >= 0.03 ? percent(shares[token]) : "";
        button.firstChild.textContent = token === 0 ? `class token ${said}` : said;
        if (token > 0) button.style.setProperty("--dim", overlay.checked ? 0.4 * (1 - shares[token] / largest) : 0);
      });
      const dragged = paintedRows(state, state.layer)[state.token];
      const painting = chosen[state.layer] === "painted" && dragged !== undefined;
      const looks = rowOf(found.maps[state.layer], "mean", state.token);
      brushes.forEach(({ input, output }, to) => {
        input.value = painting ? dragged[to] : Math.round(FULL * looks[to] / Math.max(...looks));
        input.setAttribute("aria-label", `share of ${to === 0 ? "the class token" : placeOf(to - 1)}`);
        output.textContent = percent(looks[to]);
      });
      clean.disabled = !painting;
      const whose = state.token === 0 ? "the class token" : `the token of ${placeOf(state.token - 1)}`;
      paintedTitle.textContent = `Drag what ${whose} takes from where, in layer ${state.layer}, in all heads:`;
      for (const { button, cells, head, l } of multiples.flat()) {
        const each = rowOf(found.maps[l], head, state.token), most = Math.max(...each), at = each.indexOf(most);
        cells.forEach((cell, j) => (cell.style.opacity = each[j]));
        const where = `${at ? placeOf(at - 1) : "the class token"}, ${percent(most)}`;
        const which = head === "mean" ? "mean of heads" : `head ${head}`;
        button.setAttribute("aria-label", `Layer ${l}, ${which}: most at ${where}`);
        button.setAttribute("aria-pressed", String(l === state.layer && String(head) === state.head));
      }

      editor.hidden = state.token === 0;
      if (state.token > 0) {
        const cell = state.token - 1, isKey = cell === drawn.key;
        editor.firstChild.textContent = capital(placeOf(cell));
        shape.menu.value = drawn.cells[cell].shape;
        hue.menu.value = drawn.cells[cell].hue;
        shape.menu.disabled = isKey;
        cue.textContent = state.world === "find" ? "Mark this cell" : "Move the key here";
        cue.disabled = isKey || (state.world === "find" && cell === drawn.cell);
        const free = state.world === "find" || cell === drawn.cell || isKey; // else not the hue of the key
        const taken = drawn.cells[drawn.cell].hue;
        for (const option of hue.menu.options) option.disabled = !free && +option.value === taken;
      }
      twinKind.field.hidden = twinFigure.hidden = !chosen.includes("twin");
      if (chosen.includes("twin")) {
        const other = twinOf(state, drawn);
        paint(twinScene, Explorer.render(other, state));
        const itsLabel = content.shapes[Explorer.label(other)];
        twinScene.setAttribute("aria-label", `The twin: ${NAMES[state.twin]}; its own answer would be ${itsLabel}`);
      }

      const shown = [[state.model, found.logits]];
      if (state.beside !== "none") {
        const its = everyLayer(usual(state.world, state.beside));
        shown.push([state.beside, answer(state, state.beside, its).logits]);
      }
      const now = shown.map(([, logits]) => (logits.length === BITMAPS.length ? softmax(logits) : null));
      answers.replaceChildren(...shown.map(([name, logits], i) =>
        now[i] ? bars(name, now[i], label, before[name]) : picture(name, logits)));
      before = Object.fromEntries(shown.map(([name], i) => [name, now[i]]));
      says.textContent = sentence(now[0], chosen, label);
      const missing = `The address asks for ${wrong.join(", ")}, which is not here; the rest is shown.`;
      notice.textContent = wrong.length ? missing : "";
      place.write(addressOf(state, models));
    }

    place.moved(() => {
      ({ state, wrong } = readState(place.read(), models));
      show();
    });
    show();
  }

  /* In a page of the book the address is the page's own, unless a tour has it; a link to a state leads to it. */
  const isTours = () => location.hash.startsWith("#tour=");
  const lead = () => location.hash.length > 1 && !isTours();
  let opening = true;
  const ADDRESS_BAR = {
    read: () => (isTours() ? "" : location.hash),
    write: address => {
      if (!opening || lead()) history.replaceState(null, "", address);
      opening = false;
    },
    moved: call => addEventListener("hashchange", () => {
      if (!lead()) return;
      call();
      root.scrollIntoView(); // what a link changes is to be seen
    }),
  };

  Object.assign(Explorer, { open });
  const root = document.getElementById("explorer");
  if (root) {
    open(root, globalThis.ExplorerWeights, ADDRESS_BAR);
    if (lead()) root.scrollIntoView();
  }
})();
