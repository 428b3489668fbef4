/* The explorer's state: what a reader can choose, what follows from it, and how it is written in an address.

Everything that is shown follows from one flat state: a scene is its seed and a list of edits. */
"use strict";
(() => {
  const { WORLD, TWINS, RENDERINGS } = Explorer;
  const L = 4, H = 4, N = 17;
  const CHOICES = ["own", "teacher", "twin", "uniform", "painted"];
  const FULL = 20; // the largest share that can be painted: a digit of the address
  /* The factors of a world that a reader can turn: name, lowest, highest, step. */
  const DIALS = [
    ["noise", 0, 0.6, 0.05], ["background", 0, 0.5, 0.05], ["contrast", 0.2, 1.5, 0.1], ["saturation", 0, 1, 0.1],
    ["hue_shift", 0, 0.5, 1 / 24], ["clutter", 0, 15, 1], ["cue", 0.2, 1, 0.1], ["jitter", 0, 3, 1],
    ["scale", 0.5, 1.3, 0.1], ["blur", 0, 2, 0.1], ["texture", 0, 1, 0.1], ["decoy", 0, 1, 0.1],
  ];
  const EDITS = { shape: Explorer.withShape, hue: Explorer.withHue, cue: Explorer.withCue };
  /* The first scene of a world is one whose outcomes are the usual ones, for all kinds of maps (a test finds it anew).
     It is without noise, so that the glyphs are seen. */
  const TYPICAL = { find: 14, match: 13 };
  const START = {
    world: "find", model: "scratch", beside: "none", maps: null, twin: "routing", seed: TYPICAL.find, edits: "", paint: "", token: 0,
    layer: L - 1, head: "mean", ...WORLD, noise: 0,
  };

  const begin = world => ({ ...START, world, seed: TYPICAL[world] });

  // --- What follows from a state ---

  const everyLayer = choice => Array(L).fill(choice);

  function sceneOf(state) {
    const edits = state.edits.split("_").filter(Boolean).map(edit => edit.split("."));
    const first = Explorer.draw(state.world, state.seed);
    return edits.reduce((scene, [what, cell, value]) => EDITS[what](scene, +cell, +value), first);
  }

  const twinOf = (state, scene) => Explorer.twin(scene, state.twin, state.seed + 1_000_000);

  /* The rows painted in a layer, {token: N shares}. In the address a row is "layer.token.", then a digit for each. */
  function paintedRows(state, layer) {
    const rows = state.paint.split("_").filter(Boolean).map(row => row.split("."));
    const here = rows.filter(([l]) => +l === layer);
    return Object.fromEntries(here.map(([, token, digits]) => [token, Array.from(digits, d => parseInt(d, 36))]));
  }

  /* The models of a script of weights (`export.py`): by which names, with whose maps, and what they answer. */
  function modelsIn(content) {
    const opened = {};
    const of = world => Object.keys(content.worlds[world]);
    const read = (world, name) => (opened[`${world} ${name}`] ??= Explorer.readModel(content, world, name));
    const usual = (world, name) => ({ own: "own" })[read(world, name).maps] ?? "teacher";
    const choices = state => state.maps?.split(",") ?? everyLayer(usual(state.world, state.model)); // one for each layer

    /* What a model answers, when each layer uses the maps chosen for it; a painted one has its usual map where
       nothing was painted. */
    function answer(state, name, chosen) {
      const own = read(state.world, name);
      const teacher = read(state.world, own.maps === "untrained" ? "untrained" : "teacher");
      const seen = scene => Explorer.prepare(Explorer.render(scene, state), content.pixels);
      const scene = sceneOf(state), pixels = seen(scene), needs = choice => chosen.includes(choice);
      const painting = needs("painted") && own.maps !== "own";
      const theirs = needs("teacher") || painting ? Explorer.forward(teacher, pixels).maps : [];
      const twins = needs("twin") ? Explorer.forward(teacher, seen(twinOf(state, scene))).maps : [];
      const even = Explorer.uniformMaps(L, H, N);
      const painted = l => map => Explorer.withRows(painting ? theirs[l] : map, paintedRows(state, l), N);
      const instead = chosen.map((choice, l) =>
        ({ teacher: theirs[l], twin: twins[l], uniform: even[l], painted: painted(l) })[choice]);
      return Explorer.forward(own, pixels, instead);
    }

    return { worlds: Object.keys(content.worlds), of, usual, choices, answer };
  }

  // --- The state and the address ---

  /* The state that an address asks for, and what of it is not there. */
  function read(address, models) {
    const asked = Object.fromEntries(new URLSearchParams(address.replace(/^#/, ""))), wrong = [];
    const state = begin(models.worlds.includes(asked.world) ? asked.world : models.worlds[0]);
    const within = (low, high) => text => text !== "" && +text >= low && +text <= high;
    const whole = (low, high) => text => /^\d+$/.test(text) && within(low, high)(text);
    const among = names => text => names.includes(text);
    const goodRow = row => /^[0-3]\.(\d|1[0-6])\.[0-9a-k]{17}$/.test(row) && !row.endsWith("0".repeat(N));
    const goodEdit = edit => /^(shape\.\d+\.[0-7]|hue\.\d+\.[0-5]|cue\.\d+)$/.test(edit) && +edit.split(".")[1] < 16;
    const rules = {
      world: among(models.worlds), twin: among(TWINS), rendering: among(RENDERINGS), seed: whole(0, 2 ** 31),
      model: text => models.of(state.world).includes(text),
      beside: text => text === "none" || models.of(state.world).includes(text),
      maps: text => [1, L].includes(text.split(",").length) && text.split(",").every(among(CHOICES)),
      edits: text => text === "" || text.split("_").every(goodEdit),
      paint: text => text === "" || text.split("_").every(goodRow),
      token: whole(0, N - 1), layer: whole(0, L - 1), head: text => text === "mean" || whole(0, H - 1)(text),
      ...Object.fromEntries(DIALS.map(([name, low, high]) => [name, within(low, high)])),
    };
    for (const name of Object.keys(rules)) { // the world first: models are known by it
      if (!(name in asked)) continue;
      if (rules[name](asked[name])) state[name] = typeof START[name] === "number" ? +asked[name] : asked[name];
      else wrong.push(`${name}=${asked[name]}`);
    }
    wrong.push(...Object.keys(asked).filter(name => !(name in rules)));
    if (!models.of(state.world).includes(state.model)) state.model = models.of(state.world)[0];
    if (state.maps && !state.maps.includes(",")) state.maps = everyLayer(state.maps).join(",");
    return { state, wrong };
  }

  function write(state, models) {
    const chosen = new Set(models.choices(state)), short = chosen.size === 1 ? { maps: [...chosen][0] } : {};
    const begins = begin(state.world);
    const said = Object.keys(START).filter(name => name === "world" || name === "model" || state[name] !== begins[name]);
    return "#" + said.map(name => `${name}=${{ ...state, ...short }[name]}`).join("&");
  }

  Object.assign(Explorer, {
    CHOICES, DIALS, FULL, TYPICAL, begin, everyLayer, sceneOf, twinOf, paintedRows, modelsIn, readState: read, addressOf: write,
  });
})();
