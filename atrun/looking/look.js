/* Where every token of a ViT looks on one picture, in every layer and head, with attention rollout beside it.

All that is shown follows from one state: the query, the layer, the head, the colours. A control changes the state, and
`show` draws all of it anew. The rows are those of `atrun.looking.rows`; several models and pictures share the state. */
"use strict";
(() => {
  const LEVELS = 255;
  const MAGMA = [
    [0, 0, 4], [20, 14, 54], [59, 15, 112], [100, 26, 128], [140, 41, 129], [183, 55, 121], [222, 73, 104], [247, 112, 92],
    [254, 159, 109], [254, 207, 146], [252, 253, 191],
  ];
  const COLOURS = {
    one: "0 to 1 in all pictures",
    token: "0 to this token's largest",
    row: "0 to each picture's largest",
  };
  const MANY = 64; // from so many patches on, a scale from 0 to 1 would show nothing: uniform attention gives each 1/N
  const NAMED = 3; // so many of the keys that get most are named
  const OUTLIER = 2; // as `atrun.looking.panels.OUTLIER`

  // --- A model's rows ---

  function bytesOf(text) {
    const binary = atob(text), bytes = new Uint8Array(binary.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
    return bytes;
  }

  /* What `atrun.looking.rows.Rows.content` wrote, with `row(layer, column, query)`: the N shares of a token. A layer's
     columns are its heads, "mean", "rollout" and "similarity"; a query is a number of a token. `panel(name, layer)`: what
     a panel has for each token (norms), or each patch, of a layer; null where there is none. */
  function readModel(stored) {
    const floats = text => text && new Float32Array(bytesOf(text).buffer);
    const levels = bytesOf(stored.levels), largest = floats(stored.largest);
    const [rows, columns] = stored.grid, first = stored.prefix.length, N = first + rows * columns;
    const patches = stored.down.flatMap(row => stored.across.map(column => first + row * columns + column));
    const queries = [...stored.prefix.keys(), ...patches], placeOf = new Map(queries.map((token, i) => [token, i]));
    const every = count => [...Array(count).keys()], coarse = stored.coarse && { // of other queries, over blocks of keys
      side: stored.coarse.side, levels: bytesOf(stored.coarse.levels), largest: floats(stored.coarse.largest),
    };
    const chosen = coarse ? { down: every(rows), across: every(columns) } : {};
    const whole = query => placeOf.has(query);
    const layers = stored.layers.map(({ layer, heads }) => ({ layer, heads: heads.map(String), columns: [...heads.map(String), ...stored.beside] }));
    const starts = [0];
    for (const { columns } of layers) starts.push(starts.at(-1) + columns.length);

    function row(layer, column, query) {
      const at = layers.findIndex(one => one.layer === layer);
      const before = starts[at] + layers[at].columns.indexOf(column), shares = new Float64Array(N);
      if (!whole(query)) return overBlocks(before * rows * columns + query - first, shares);
      const index = before * queries.length + placeOf.get(query), code = levels.subarray(index * N, (index + 1) * N);
      for (let key = 0; key < N; key++) shares[key] = largest[index] * (code[key] / LEVELS) ** 2;
      return shares;
    }
    function overBlocks(index, shares) {
      const { side } = coarse, across = Math.ceil(columns / side), count = first + Math.ceil(rows / side) * across;
      for (let key = 0; key < N; key++) {
        const [row, column] = placed(key), block = key < first ? key : first + Math.floor(row / side) * across + Math.floor(column / side);
        shares[key] = coarse.largest[index] * (coarse.levels[index * count + block] / LEVELS) ** 2;
      }
      return shares;
    }

    const panels = {
      norms: floats(stored.norms), gradient: floats(stored.gradient), components: stored.components && bytesOf(stored.components),
    };
    function panel(name, layer) {
      const values = panels[name], at = layers.findIndex(one => one.layer === layer);
      if (!values) return null;
      const size = values.length / layers.length;
      return values.subarray(at * size, (at + 1) * size);
    }

    const placed = token => [Math.floor((token - first) / columns), (token - first) % columns];
    const nameOf = token => (token < first ? stored.prefix[token] : `patch row ${placed(token)[0]}, column ${placed(token)[1]}`);
    return { ...stored, ...chosen, coarse, whole, rows, columns, first, N, layers, row, panel, placed, nameOf };
  }

  const nearest = (numbers, wanted) => numbers.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));

  /* The token that a state's query is in a model: the prefix token of that name, else the nearest patch that is kept. */
  function queryIn(model, { prefix, x, y }) {
    if (model.prefix.includes(prefix)) return model.prefix.indexOf(prefix);
    const row = nearest(model.down, y * model.rows - 0.5), column = nearest(model.across, x * model.columns - 0.5);
    return model.first + row * model.columns + column;
  }

  const atPatch = (model, row, column) => ({ prefix: null, x: (column + 0.5) / model.columns, y: (row + 0.5) / model.rows });

  /* The layer and the column of a model that are nearest to those of the state, which another model may have. */
  function chosenIn(model, state) {
    const layer = nearest(model.layers.map(one => one.layer), state.layer);
    const { heads } = model.layers.find(one => one.layer === layer);
    return { layer, column: state.head === "mean" ? "mean" : String(nearest(heads.map(Number), +state.head)) };
  }

  const sum = shares => shares.reduce((a, b) => a + b, 0);
  const largestPatch = (model, shares) => shares.subarray(model.first).reduce((a, b) => Math.max(a, b), 0);

  // --- Words ---

  function number(share) {
    if (share >= 0.1 || share === 0) return share.toFixed(share === 0 ? 0 : 2);
    return share < 0.0001 ? "less than 0.0001" : String(Number(share.toPrecision(2)));
  }

  const upper = text => text[0].toUpperCase() + text.slice(1);
  const inLayer = ({ layer, column }) => `layer ${layer}, ${column === "mean" ? "mean of all heads" : `head ${column}`}`;

  /* To whom a row gives most, as a sentence. */
  function says(model, shares, query, where) {
    const keys = Array.from(shares.keys()).sort((a, b) => shares[b] - shares[a]).slice(0, NAMED);
    const given = keys.map(key => `${number(shares[key])} to ${key === query ? "itself" : model.nameOf(key)}`);
    const means = model.whole(query) ? "" : `, means of blocks of ${model.coarse.side} x ${model.coarse.side} patches`;
    return `${upper(model.nameOf(query))}, ${where}${means}: gives ${given.join("; ")}.`;
  }

  /* What of a row goes to the tokens that have no place in the picture. */
  function beside(model, shares) {
    const given = model.prefix.map((name, token) => `${name} ${number(shares[token])}`);
    return [...given, `all patches ${number(sum(shares.subarray(model.first)))}`].join(" · ");
  }

  // --- Elements ---

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  }

  /* A colour of the scale, for a share of its top. */
  function colourOf(part) {
    const place = Math.min(Math.max(part, 0), 1) * (MAGMA.length - 1), below = Math.min(Math.floor(place), MAGMA.length - 2);
    return MAGMA[below].map((value, i) => value + (place - below) * (MAGMA[below + 1][i] - value));
  }
  const TABLE = Array.from({ length: LEVELS + 1 }, (_, level) => colourOf(level / LEVELS));

  /* The patches' shares of a row, a pixel each; with `root` their roots are drawn, so that small ones are seen. */
  function paint(canvas, model, shares, { top, root }) {
    const picture = new ImageData(model.columns, model.rows);
    for (let i = 0; i < model.rows * model.columns; i++) {
      const part = top > 0 ? Math.min(shares[model.first + i] / top, 1) : 0;
      picture.data.set([...TABLE[Math.round(LEVELS * (root ? Math.sqrt(part) : part))], 255], 4 * i);
    }
    canvas.width = model.columns;
    canvas.height = model.rows;
    canvas.getContext("2d").putImageData(picture, 0, 0);
  }

  /* Colours of patches, three bytes each. */
  function paintColours(canvas, model, bytes) {
    const picture = new ImageData(model.columns, model.rows);
    for (let i = 0; i < model.rows * model.columns; i++) picture.data.set([...bytes.subarray(3 * i, 3 * i + 3), 255], 4 * i);
    canvas.width = model.columns;
    canvas.height = model.rows;
    canvas.getContext("2d").putImageData(picture, 0, 0);
  }

  const chooser = (label, options, change) => {
    const items = Object.entries(options).map(([value, text]) => make("option", { value }, text));
    const select = make("select", { "aria-label": label, change: () => change(select.value) }, ...items);
    return { field: make("label", { class: "look-field" }, make("span", {}, label), select), select };
  };

  /* A photograph with numbers of its patches over it, or colours, their scale, and `under` in words; `pick(row, column)`
     is called for a click on it. */
  function makePicture(model, pick, attributes = {}) {
    const [chosen, pointed] = ["look-chosen", "look-pointed"].map(name => make("div", { class: name, hidden: true }));
    const canvas = make("canvas", { "aria-hidden": "true" });
    // "dark-light": what a page's theme does to pictures on a dark ground, it leaves this one alone
    const image = make("img", { class: "dark-light", src: model.photograph, alt: `The picture as ${model.name} is given it`, draggable: "false" });
    const small = () => image.classList.toggle("look-coarse", image.naturalWidth < 128);
    image.addEventListener("load", small);
    const stage = make("div", { class: "look-stage", ...attributes }, image, canvas, chosen, pointed);
    const caption = make("div", { class: "look-caption" }), under = make("div", { class: "look-under" });
    const [middle, end] = [make("span"), make("span")];
    const scaleBox = make("div", { class: "look-scale", "aria-hidden": "true" }, make("i"), make("span", {}, "0"), middle, end);
    const read = make("div", { class: "look-read", "aria-hidden": "true" });
    let shown = null;

    const within = (event, size, box, start) => Math.floor(Math.min(Math.max((event - start) / box, 0), 0.999999) * size);
    const patchAt = event => {
      const box = stage.getBoundingClientRect();
      return [within(event.clientY, model.rows, box.height, box.top), within(event.clientX, model.columns, box.width, box.left)];
    };
    function outline(element, row, column) {
      const share = (part, whole) => `${(100 * part) / whole}%`;
      Object.assign(element.style, {
        left: share(column, model.columns), top: share(row, model.rows), width: share(1, model.columns), height: share(1, model.rows),
      });
      element.hidden = false;
    }
    const told = (before, row, column) =>
      `${before}row ${row}, column ${column}: ${number(shown[model.first + row * model.columns + column])}`;
    function rest() {
      pointed.hidden = true;
      read.textContent = shown && told("most to ", ...model.placed(shown.indexOf(largestPatch(model, shown), model.first)));
    }
    stage.addEventListener("click", event => pick(...patchAt(event)));
    stage.addEventListener("pointerleave", rest);
    stage.addEventListener("pointermove", event => {
      const [row, column] = patchAt(event);
      outline(pointed, row, column);
      read.textContent = shown && told("to ", row, column);
    });

    /* shares: a number a token; or colours: three bytes a patch; marked: patches that are outlined, by their tokens. */
    function show({ photograph, shares = null, top, root = false, colours, query, title, opacity, says, marked = [] }) {
      shown = shares;
      rest();
      if (image.src !== photograph) image.src = photograph;
      if (shares) paint(canvas, model, shares, { top, root });
      else paintColours(canvas, model, colours);
      scaleBox.hidden = !shares;
      canvas.style.opacity = opacity;
      caption.textContent = title;
      if (shares) [middle.textContent, end.textContent] = [number(top / (root ? 4 : 2)), number(top)];
      under.textContent = says;
      stage.querySelectorAll(".look-marked").forEach(mark => mark.remove());
      for (const token of marked) {
        const mark = make("div", { class: "look-marked" });
        outline(mark, ...model.placed(token));
        stage.append(mark);
      }
      if (query < model.first) chosen.hidden = true;
      else outline(chosen, ...model.placed(query));
    }
    return { box: make("div", {}, caption, stage, scaleBox, read, under), show };
  }

  /* The small pictures of a model: a row a layer, a column a head; `pick(layer, column)` is called for a choice. */
  function makeMultiples(model, pick) {
    const columns = [...new Set(model.layers.flatMap(one => one.heads))].sort((a, b) => a - b);
    columns.push(...model.beside);
    const placeOf = column => 2 + columns.indexOf(column) + isNaN(column); // a gap before words
    const at = (column, element) => Object.assign(element.style, { gridColumn: placeOf(column) }) && element;
    const header = columns.map(column => at(column, make("span", { class: isNaN(column) ? "look-word" : null }, column)));
    const cells = model.layers.flatMap(one => one.columns.map(column => {
      const canvas = make("canvas", { "aria-hidden": "true" });
      const button = at(column, make("button", { type: "button", click: () => pick(one.layer, column) }, canvas));
      canvas.style.aspectRatio = `${model.columns} / ${model.rows}`;
      return { layer: one.layer, column, button, canvas };
    }));
    const rows = model.layers.flatMap(one => [
      make("span", { class: "look-layer" }, String(one.layer)), ...cells.filter(cell => cell.layer === one.layer).map(cell => cell.button),
    ]);
    const corner = make("span", { class: "look-corner" }, "layer\u00a0\u2193 head\u00a0\u2192");
    const grid = make("div", { class: "look-grid", role: "group", "aria-label": `All layers and heads of ${model.name}`, keydown: move }, corner, ...header, ...rows);
    grid.style.setProperty("--heads", columns.length - model.beside.length);

    function move(event) {
      const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      const here = cells.find(cell => cell.button === event.target);
      if (!steps || !here) return;
      event.preventDefault();
      const numbers = model.layers.map(one => one.layer);
      const layer = numbers[numbers.indexOf(here.layer) + steps[0]], column = columns[columns.indexOf(here.column) + steps[1]];
      const there = cells.find(cell => cell.layer === layer && cell.column === column);
      if (!there) return;
      pick(layer, column);
      there.button.focus();
    }

    function show(model, chosen, query, scaleOf) {
      for (const { layer, column, button, canvas } of cells) {
        const shares = model.row(layer, column, query), most = largestPatch(model, shares);
        paint(canvas, model, shares, scaleOf(column, shares));
        const here = layer === chosen.layer && column === chosen.column;
        button.setAttribute("aria-pressed", here);
        button.tabIndex = here ? 0 : -1;
        const words = { rollout: `rollout through layer ${layer}`, similarity: `similarity after layer ${layer}` };
        const where = words[column] ?? inLayer({ layer, column });
        button.setAttribute("aria-label", `${where}: at most ${number(most)} to a patch`);
        button.title = `${upper(where)}: at most ${number(most)} to a patch`;
      }
    }
    return { box: make("div", { class: "look-multiples" }, grid), show };
  }

  // --- What stands beside a map: what `makePicture` shows of a layer, and of a query ---

  const inPanel = {
    rollout(model, layer, query, scaleOf) {
      const shares = model.row(layer, "rollout", query);
      const title = `Rollout, ${layer === 0 ? "layer 0" : `layers 0 to ${layer}`}`;
      return { ...scaleOf("rollout", shares), shares, title, says: `Given to: ${beside(model, shares)}` };
    },
    similarity(model, layer, query) {
      const shares = model.row(layer, "similarity", query);
      return { shares, top: 1, title: `Similarity after layer ${layer}`, says: `Cosine of the features with those of ${model.nameOf(query)}` };
    },
    components: (model, layer) => ({
      colours: model.panel("components", layer), title: `Features after layer ${layer}`, says: "Their first three principal components, as red, green, blue",
    }),
    norms(model, layer) {
      const shares = Float64Array.from(model.panel("norms", layer)), sorted = shares.slice(model.first).sort();
      const median = sorted[Math.floor((sorted.length - 1) / 2)];
      const marked = [...shares.keys()].filter(token => token >= model.first && shares[token] > OUTLIER * median);
      const says = `Median ${number(median)}; outliers, above twice that: ${marked.length || "none"}`;
      return { shares, top: largestPatch(model, shares), title: `Norms after layer ${layer}`, says, marked };
    },
    gradient(model, layer) {
      const values = model.panel("gradient", layer), most = values.reduce((a, b) => Math.max(a, b), 0) || 1;
      const shares = Float64Array.from({ length: model.N }, (_, i) => (i < model.first ? 0 : values[i - model.first] / most));
      return { shares, top: 1, title: `Gradient, layer ${layer}`, says: "What more attention to a patch would add to the answer, of the largest" };
    },
  };
  const PANELS = Object.keys(inPanel);

  // --- The whole ---

  function open(block) {
    const content = JSON.parse(block.querySelector("script[type='application/json']").textContent);
    const all = [content.models, ...content.more].map(models => models.map(readModel)); // of each picture
    const [models] = all, [main] = models, several = models.length > 1;
    const prefix = [...new Set(models.flatMap(model => model.prefix))];
    const layers = [...new Set(models.flatMap(model => model.layers.map(one => one.layer)))].sort((a, b) => a - b);
    const heads = [...new Set(models.flatMap(model => model.layers.flatMap(one => one.heads)))].sort((a, b) => a - b);
    const middle = atPatch(main, Math.floor(main.rows / 2), Math.floor(main.columns / 2));
    const start = {
      query: prefix.includes("class token") ? { ...middle, prefix: "class token" } : middle, layer: layers.at(-1), head: heads.length > 1 ? "mean" : heads[0],
      colours: models.every(model => model.rows * model.columns <= MANY) ? "one" : "row",
      root: false, map: 65, picture: 0,
    };
    let state = { ...start };

    const change = part => {
      state = { ...state, ...part };
      show();
      write();
    };

    // controls
    const layer = chooser("Layer", {}, value => change({ layer: +value }));
    const picture = chooser("Photograph", {}, value => change({ picture: +value }));
    picture.select.append(...content.pictures.map((name, i) => make("option", { value: i }, name)));
    const head = chooser("Head", {}, value => change({ head: value }));
    layer.select.append(...layers.map(one => make("option", { value: one }, String(one))));
    head.select.append(...heads.map(one => make("option", { value: one }, String(one))), make("option", { value: "mean" }, "mean of all"));
    const colours = chooser("Colours", COLOURS, value => change({ colours: value }));
    const root = make("input", { type: "checkbox", autocomplete: "off", change: () => change({ root: root.checked }) });
    const small = make("label", { class: "look-field" }, make("span", {}, "Small shares"), make("span", { class: "look-check" }, root, "brighter, as roots"));
    const map = make("input", { type: "range", min: 0, max: 100, step: 5, autocomplete: "off", input: () => change({ map: +map.value }) });
    const over = make("label", { class: "look-field" }, make("span", {}, "Map over photograph"), map);
    const tokens = prefix.map(name => make("button", { type: "button", click: () => change({ query: { ...state.query, prefix: name } }) }, name));
    const patch = make("button", { type: "button", click: () => change({ query: { ...state.query, prefix: null } }) });
    const group = make("div", { class: "look-tokens", role: "group", "aria-label": "Query" }, make("span", {}, "Query"), ...tokens, patch);
    if (main.down.length * main.across.length < main.rows * main.columns)
      group.append(make("span", {}, `${main.down.length} x ${main.across.length} of ${main.rows} x ${main.columns} patches can be chosen`));
    const said = make("p", { class: "look-says", "aria-live": "polite" });

    // a section a model
    const sections = models.map(model => {
      const pick = (row, column) => change({ query: atPatch(model, nearest(model.down, row), nearest(model.across, column)) });
      const keys = `Arrow keys choose a patch${model.prefix.length ? `, Home the ${model.prefix[0]}` : ""}; Page Up and Page Down change the layer.`;
      const attributes = {
        tabindex: 0, role: "application", "aria-roledescription": "photograph in patches",
        "aria-label": `Photograph as ${model.name} cuts it, ${model.rows} by ${model.columns} patches. ${keys}`, keydown: event => press(event, model, pick),
      };
      const picture = makePicture(model, pick, attributes);
      const panels = Object.fromEntries(PANELS.filter(name => name === "rollout" || name === "gradient" || model.panel("norms", model.layers[0].layer))
        .map(name => [name, makePicture(model, pick)]));
      const multiples = makeMultiples(model, (layer, column) => change(isNaN(column) && column !== "mean" ? { layer } : { layer, head: column }));
      const name = several ? [make("p", { class: "look-name" }, model.name)] : [];
      picture.box.className = "look-main";
      for (const { box } of Object.values(panels)) box.className = "look-beside";
      const pictures = make("div", { class: "look-pictures" }, picture.box, ...Object.values(panels).map(one => one.box));
      return { model, picture, panels, multiples, box: make("section", { class: "look-model", "aria-label": model.name }, ...name, pictures, multiples.box) };
    });

    function press(event, model, pick) {
      const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      const turn = { PageUp: -1, PageDown: 1 }[event.key];
      if (event.ctrlKey || event.altKey || event.metaKey || !(steps || turn || (event.key === "Home" && prefix.length))) return;
      event.preventDefault();
      if (turn) return void change({ layer: layers[layers.indexOf(state.layer) + turn] ?? state.layer });
      if (!steps) return void change({ query: { ...state.query, prefix: prefix[0] } });
      const query = queryIn(model, state.query);
      if (query < model.first) return void change({ query: { ...state.query, prefix: null } }); // first into the picture
      const [row, column] = model.placed(query), next = (kept, here, step) => kept[kept.indexOf(here) + step] ?? here;
      pick(next(model.down, row, steps[0]), next(model.across, column, steps[1]));
    }

    function show() {
      picture.select.value = state.picture;
      layer.select.value = state.layer;
      head.select.value = state.head;
      colours.select.value = state.colours;
      root.checked = state.root;
      map.value = state.map;
      prefix.forEach((name, i) => tokens[i].setAttribute("aria-pressed", name === state.query.prefix));
      patch.setAttribute("aria-pressed", state.query.prefix === null);
      patch.textContent = main.nameOf(queryIn(main, { ...state.query, prefix: null }));
      const seen = sections.map(({ model }) => ({ query: queryIn(model, state.query), chosen: chosenIn(model, state) }));

      // the largest of this token's shares to a patch, in maps and in rollouts, over all models
      const tops = { maps: 0, rollout: 0 };
      const here = all[state.picture];
      if (state.colours === "token") here.forEach((model, i) => model.layers.forEach(one => one.columns.filter(column => column !== "similarity").forEach(column => {
        const kind = column === "rollout" ? "rollout" : "maps";
        tops[kind] = Math.max(tops[kind], largestPatch(model, model.row(one.layer, column, seen[i].query)));
      })));
      const topOf = (model, column, shares) => column === "similarity" ? 1 :
        ({ one: 1, row: largestPatch(model, shares), token: tops[column === "rollout" ? "rollout" : "maps"] })[state.colours];

      const sentences = sections.map(({ picture, panels, multiples }, i) => {
        const model = here[i], { query, chosen } = seen[i], { layer } = chosen;
        const shares = model.row(layer, chosen.column, query);
        const scaleOf = (column, row) => ({ top: topOf(model, column, row), root: state.root });
        const common = { photograph: model.photograph, query, opacity: state.map / 100 };
        picture.show({ ...common, ...scaleOf(chosen.column, shares), shares, title: upper(inLayer(chosen)), says: `Given to: ${beside(model, shares)}` });
        for (const [name, panel] of Object.entries(panels)) panel.show({ ...common, ...inPanel[name](model, layer, query, scaleOf) });
        multiples.show(model, chosen, query, scaleOf);
        return (several ? `${model.name}: ` : "") + says(model, shares, query, inLayer(chosen));
      });
      said.replaceChildren(...sentences.flatMap((sentence, i) => (i ? [make("br"), sentence] : [sentence])));
    }

    // the address of a page of its own
    const keeps = block.hasAttribute("data-address");
    function write() {
      if (!keeps) return;
      const { query, layer, head, colours, root, map, picture } = state;
      const patch = main.placed(queryIn(main, { ...query, prefix: null })).join(".");
      history.replaceState(null, "", `#${new URLSearchParams({ token: query.prefix ?? patch, layer, head, colours, root: +root, map, picture })}`);
    }
    function read() {
      const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1))), whole = text => /^\d+$/.test(text ?? "");
      const [row, column] = (asked.token ?? "").split(".");
      state = { ...start };
      if (prefix.includes(asked.token)) state.query = { ...middle, prefix: asked.token };
      else if (whole(row) && whole(column)) state.query = atPatch(main, nearest(main.down, +row), nearest(main.across, +column));
      if (whole(asked.layer)) state.layer = nearest(layers, +asked.layer);
      if (asked.head === "mean" || heads.includes(asked.head)) state.head = asked.head;
      if (asked.colours in COLOURS) state.colours = asked.colours;
      state.root = asked.root === "1";
      if (whole(asked.map)) state.map = Math.min(+asked.map, 100);
      if (whole(asked.picture)) state.picture = Math.min(+asked.picture, all.length - 1);
      show();
    }

    const notes = make("ul", {}, ...content.notes.map(note => make("li", {}, note)));
    block.querySelector(".look-before").remove();
    block.append(
      make("div", { class: "look-controls" }, ...(all.length > 1 ? [picture.field] : []), layer.field, head.field, colours.field, small, over),
      group, said, make("div", { class: several ? "look-models look-several" : "look-models" }, ...sections.map(section => section.box)),
      make("details", { class: "look-notes", open: true }, make("summary", {}, "What was done, and what is kept"), notes),
    );
    if (keeps) {
      window.addEventListener("hashchange", read);
      read();
    } else show();
  }

  for (const block of document.querySelectorAll('[data-look="__HASH__"]')) if (block.querySelector(".look-before")) open(block);
})();
