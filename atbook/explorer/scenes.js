/* Scenes of the two worlds, Find and Match, as data, and how they are drawn: a port of atbook/worlds/glyphs.py.

A scene is {task, cell, key, decoy, noise, cells}: task "find" or "match"; cell: where the named glyph is (and in Find
the mark); key: the key's cell in Match, -1 in Find; decoy: the cell of Find's false mark; noise: the seed of the pixel
noise; cells: 16 of {shape, hue, jitter, shade, offset, crowd, stripes}, rows first. shape and hue are indices; jitter
turns the hue a little; shade is the brightness; offset: two numbers below 1, where in its cell the glyph lies; crowd:
the cells with the lowest hold a glyph, as many as the world has clutter; stripes: the direction of those that cut the
glyph. In Match the key has the named glyph's hue, and no other cell has.

A world is an object of the factors below. Whatever is drawn follows from a scene and a world; numbers are rounded
to float32 where the generator's are, so that without noise every byte is the same. */
"use strict";
(() => {
  const GRID = 4, CELL = 8, SIDE = GRID * CELL, CELLS = GRID * GRID, HUES = 6;
  const BITMAPS = [
    "..##.. ..##.. ###### ###### ..##.. ..##..", // plus
    "###### #....# #....# #....# #....# ######", // ring
    "#....# .#..#. ..##.. ..##.. .#..#. #....#", // cross
    "###### ###### ..##.. ..##.. ..##.. ..##..", // tee
    "##.... ##.... ##.... ##.... ###### ######", // ell
    "#..... ##.... ###... ####.. #####. ######", // wedge
    "###### ...... ###### ###### ...... ######", // bars
    "##..## ##..## ##..## ##..## ###### ######", // cup
  ].map(rows => rows.split(" "));
  const WORLD = Object.freeze({
    noise: 0.2, background: 0.1, contrast: 1, saturation: 1, hue_shift: 0, clutter: CELLS - 1, cue: 0.9, jitter: 1,
    scale: 1, rendering: "filled", blur: 0, decoy: 0, texture: 0,
  });
  const TASKS = ["find", "match"], TWINS = ["routing", "message", "distractors", "unrelated"];
  const RENDERINGS = ["filled", "inverted", "dotted"];
  const f32 = Math.fround;

  /* Half to even, as Python and numpy round. */
  function rint(x) {
    const down = Math.floor(x), rest = x - down;
    return rest < 0.5 || (rest === 0.5 && down % 2 === 0) ? down : down + 1;
  }

  /* A function that draws numbers in [0, 1), the same for the same seed: Tommy Ettinger's mulberry32. */
  function random(seed) {
    let state = seed >>> 0;
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let z = state;
      z = Math.imul(z ^ (z >>> 15), z | 1);
      z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
      return ((z ^ (z >>> 14)) >>> 0) / 2 ** 32;
    };
  }

  /* A new scene of a task; equal seeds give equal scenes. */
  function draw(task, seed) {
    requireKnown(task, TASKS, "task");
    const next = random(seed), below = n => Math.floor(n * next());
    const cell = below(CELLS), other = (cell + 1 + below(CELLS - 1)) % CELLS;
    const cells = Array.from({ length: CELLS }, () => ({
      shape: below(BITMAPS.length), hue: below(HUES), jitter: 0.08 * next() - 0.04, shade: 0.6 + 0.4 * next(),
      offset: [next(), next()], crowd: next(),
    }));
    if (task === "match") {
      const named = cells[cell].hue;
      for (const one of cells) one.hue = (named + 1 + below(HUES - 1)) % HUES; // never the hue of the named glyph ...
      cells[cell].hue = cells[other].hue = named; // ... but for itself and the key
    }
    const noise = below(2 ** 32), decoy = (cell + 1 + below(CELLS - 1)) % CELLS;
    for (const one of cells) one.stripes = below(STRIPES.length);
    return { task, cell, key: task === "match" ? other : -1, decoy, noise, cells };
  }

  /* A twin of a scene. "routing": the same places and hues, other shapes; "message": the named glyph's shape in
     another scene; "distractors": the same scene with other glyphs around the named one, and the same pixel noise;
     "unrelated": another scene. */
  function twin(scene, what, seed) {
    requireKnown(what, TWINS, "twin");
    const other = draw(scene.task, seed), named = scene.cells[scene.cell];
    if (what === "unrelated") return other;
    if (what === "routing") {
      const cells = scene.cells.map((one, i) => ({ ...one, shape: other.cells[i].shape }));
      return { ...scene, noise: other.noise, cells };
    }
    if (what === "message") {
      other.cells[other.cell].shape = named.shape;
      return other;
    }
    // How far the other scene's hues are from its named glyph's stays; only the named glyph's is this scene's.
    const turn = scene.task === "match" ? named.hue - other.cells[other.cell].hue : 0;
    const next = random(seed + 1);
    const cells = other.cells.map((one, i) => {
      if (i === scene.cell) return named;
      if (i === scene.key) return { ...one, hue: named.hue };
      // the other scene's named glyph and key stand elsewhere: there is none of that hue here
      const apart = scene.task === "match" && (i === other.cell || i === other.key);
      const hue = apart ? named.hue + 1 + Math.floor((HUES - 1) * next()) : one.hue + turn;
      return { ...one, hue: (hue + HUES) % HUES };
    });
    return { ...scene, cells };
  }

  /* Which cells hold something: the named glyph, the key, and as many others as the world has clutter. */
  function present(scene, world = WORLD) {
    const rank = scene.cells.map((one, i) => (i === scene.cell ? -1 : i === scene.key ? 2 : one.crowd));
    return rank.map((mine, i) => i === scene.key || rank.filter(theirs => theirs < mine).length <= world.clutter);
  }

  const label = scene => scene.cells[scene.cell].shape;

  /* A scene with another shape in a cell. */
  const withShape = (scene, cell, shape) => changed(scene, { [cell]: { shape } });

  /* A scene with another hue in a cell. In Match the named glyph and the key change together, and whoever had their
     new hue takes their old one; another glyph that asks for their hue is refused, which gives the same scene. */
  function withHue(scene, cell, hue) {
    if (scene.task === "find") return changed(scene, { [cell]: { hue } });
    const old = scene.cells[scene.cell].hue, pair = [scene.cell, scene.key];
    if (!pair.includes(cell)) return hue === old ? scene : changed(scene, { [cell]: { hue } });
    const edits = scene.cells.map((one, i) => (pair.includes(i) ? { hue } : one.hue === hue ? { hue: old } : {}));
    return changed(scene, edits);
  }

  /* A scene whose mark (Find) is on another cell, or whose key (Match) is in another cell: there it changes places
     with what was in that cell. */
  function withCue(scene, cell) {
    if (scene.task === "find") return { ...scene, cell, decoy: cell === scene.decoy ? scene.cell : scene.decoy };
    const cells = scene.cells.slice();
    [cells[cell], cells[scene.key]] = [cells[scene.key], cells[cell]];
    return { ...scene, cells, key: cell, cell: scene.cell === cell ? scene.key : scene.cell };
  }

  function changed(scene, edits) {
    return { ...scene, cells: scene.cells.map((one, i) => ({ ...one, ...edits[i] })) };
  }

  /* HSV to RGB, for a hue in turns of the colour circle. */
  function colour(turns, saturation, shade) {
    return [0, 4, 2].map(third => {
      const pure = Math.min(1, Math.max(0, Math.abs((turns * 6 + third) % 6 - 3) - 1));
      return f32(shade * (1 - saturation + saturation * pure));
    });
  }

  /* Whether a glyph covers a pixel of its cell. move: how far down and to the right it is moved, 0 to 2 jitter. */
  function inked(shape, move, row, column, world) {
    const size = rint(6 * world.scale), first = Math.floor((CELL - size) / 2) - world.jitter;
    const y = row - first - move[0], x = column - first - move[1];
    if (y < 0 || x < 0 || y >= size || x >= size) return false;
    if (world.rendering === "dotted" && (x + y) % 2 === 1) return false;
    return BITMAPS[shape][Math.floor(6 * y / size)][Math.floor(6 * x / size)] === "#";
  }

  /* Of stripes across, down, and along both diagonals: whether they cut a pixel of a cell. */
  const STRIPES = [
    (row, column) => row % 2 === 1, (row, column) => column % 2 === 1,
    (row, column) => Math.floor((row + column) / 2) % 2 === 1,
    (row, column) => Math.abs(Math.floor((row - column) / 2)) % 2 === 1,
  ];

  const atEdge = i => i === 0 || i === CELL - 1;
  const isDot = (row, column) => atEdge(row) && atEdge(column); // the mark of Find
  const isFalseDot = (row, column) => isDot(row, column) && row + column < 2 * CELL - 2; // it lacks the last one
  const isFrame = (row, column) => atEdge(row) || atEdge(column); // the key of Match: a frame ...
  const isSquare = (row, column) => [row, column].every(i => i >= 2 && i < CELL - 2); // ... and a square in it

  /* Standard normal numbers, one for every colour of every pixel: Box and Muller 1958. */
  function* normal(seed) {
    const next = random(seed);
    for (;;) {
      const radius = Math.sqrt(-2 * Math.log(1 - next())), angle = 2 * Math.PI * next();
      yield radius * Math.cos(angle);
      yield radius * Math.sin(angle);
    }
  }

  /* level (3, 32, 32) with a Gaussian blur along rows, then along columns; edges are repeated. */
  function blurred(level, sigma) {
    const radius = Math.max(1, rint(3 * sigma)), steps = Array.from({ length: 2 * radius + 1 }, (_, i) => i - radius);
    const bell = steps.map(step => Math.exp(-0.5 * (step / sigma) ** 2));
    const kernel = bell.map(value => f32(value / bell.reduce((a, b) => a + b)));
    for (const stride of [1, SIDE]) {
      level = level.map((_, place) => {
        const at = Math.floor(place / stride) % SIDE; // along this axis
        return steps.reduce((sum, step, i) => {
          const from = Math.min(SIDE - 1, Math.max(0, at + step));
          return f32(sum + f32(kernel[i] * level[place + (from - at) * stride]));
        }, 0);
      });
    }
    return level;
  }

  /* A scene as the world shows it: bytes (3, 32, 32). */
  function render(scene, world = WORLD) {
    let level = new Float32Array(3 * SIDE * SIDE);
    const match = scene.task === "match", held = present(scene, world);
    const background = f32(world.background), above = part => f32(world.background + part * (1 - world.background));
    const lit = above(world.cue), falselyLit = above(world.decoy), cut = f32(1 - world.texture);
    scene.cells.forEach((one, index) => {
      const move = one.offset.map(part => Math.floor(part * (2 * world.jitter + 1)));
      const turns = (one.hue / HUES + one.jitter + world.hue_shift) % 1;
      const full = colour(turns < 0 ? turns + 1 : turns, world.saturation, one.shade);
      const isKey = match && index === scene.key, cued = match ? isKey : index === scene.cell;
      const misleads = !match && world.decoy > 0 && index === scene.decoy;
      for (let row = 0; row < CELL; row++) {
        for (let column = 0; column < CELL; column++) {
          const glyph = inked(one.shape, move, row, column, world) !== (world.rendering === "inverted");
          const filled = isKey ? isSquare(row, column) : held[index] && glyph;
          const shines = cued && (match ? isFrame : isDot)(row, column);
          const deceives = misleads && isFalseDot(row, column);
          const mask = !isKey && world.texture > 0 && STRIPES[one.stripes](row, column) ? cut : 1;
          const place = (Math.floor(index / GRID) * CELL + row) * SIDE + (index % GRID) * CELL + column;
          full.forEach((value, channel) => {
            const ink = filled ? f32(background + f32(mask * f32(value - background))) : background;
            level[channel * SIDE * SIDE + place] = shines ? lit : deceives ? falselyLit : ink;
          });
        }
      }
    });
    if (world.blur > 0) level = blurred(level, world.blur);
    const noise = normal(scene.noise), contrast = f32(world.contrast);
    return Uint8Array.from(level, value => {
      const clear = f32(0.5 + f32(contrast * f32(value - 0.5)));
      const noisy = world.noise > 0 ? f32(clear + world.noise * noise.next().value) : clear;
      return Math.min(255, Math.max(0, rint(f32(noisy * 255))));
    });
  }

  function requireKnown(value, known, what) {
    if (!known.includes(value)) throw new RangeError(`no ${what} is called ${value}; known: ${known.join(", ")}`);
  }

  globalThis.Explorer = Object.assign(globalThis.Explorer ?? {}, {
    BITMAPS, WORLD, TASKS, TWINS, RENDERINGS, random, normal, draw, twin, present, label, withShape, withHue, withCue,
    render,
  });
})();
