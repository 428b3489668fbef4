/* The tour's drawing: what the teacher sees, its map, and what the student sees, with the flow of attention between. */
"use strict";
(() => {
  const { svg } = Explorer;
  const GRID = 4;
  const WIDE = 400, SIDE = 120, TOP = 40; // of the drawing's units: a phone of 390 pixels has 0.9 of one each
  const BOX = 16, SPACE = 4; // the class token's box above a picture or a map: its height, and what is between
  const MARGIN = 5; // for frames at the edge
  const DIFFERS = 0.05; // two maps' shares that are this far apart are framed

  /* Where the parts are: the left end, the top and the side of each one's cells; and where all of it ends. kind: "painted", where the map is to be
     pointed at, and large; "compared", where a second map is below the first; or "plain". */
  function placesOf(kind) {
    const teacher = kind === "painted" ? 72 : SIDE, map = { painted: 136, compared: 80, plain: 88 }[kind];
    const gap = (WIDE - teacher - map - SIDE) / 2, left = teacher + gap;
    const mapTop = kind === "plain" ? TOP + (SIDE - map) / 2 : TOP, secondTop = mapTop + map + BOX + 3 * SPACE;
    return {
      teacher: { left: 0, top: TOP, side: teacher }, map: { left, top: mapTop, side: map },
      student: { left: left + map + gap, top: TOP, side: SIDE },
      second: { left, top: secondTop, side: map },
      bottom: kind === "compared" ? secondTop + map : TOP + Math.max(SIDE, map),
    };
  }

  /* The middle of a token and half of its width and height; the class token is the box above the cells. */
  function place({ left, top, side }, token) {
    if (token === 0) return { x: left + side / 2, y: top - SPACE - BOX / 2, across: side / 2, down: BOX / 2 };
    const cell = token - 1, half = side / GRID / 2;
    return { x: left + (cell % GRID * 2 + 1) * half, y: top + (Math.floor(cell / GRID) * 2 + 1) * half, across: half, down: half };
  }

  /* A token's square, or the class token's box; more: how much larger it is on each side. */
  function square(part, token, attributes, more = 0) {
    const { x, y, across, down } = place(part, token), round = token === 0 ? { rx: BOX / 2 + more } : {};
    return svg("rect", {
      x: x - across - more, y: y - down - more, width: 2 * (across + more), height: 2 * (down + more), ...round, ...attributes,
    });
  }

  /* From the right edge of a token to the left edge of another. */
  function flow(from, to, share) {
    const [x1, x2] = [from.x + from.across, to.x - to.across], bend = (x2 - x1) / 2;
    const d = `M${x1} ${from.y}C${x1 + bend} ${from.y} ${x2 - bend} ${to.y} ${x2} ${to.y}`;
    return svg("path", { d, class: "tour-flow", "stroke-width": 1 + 4 * share });
  }

  const words = (x, y, text, anchor = "middle", attributes = {}) => svg("text", { x, y, "text-anchor": anchor, ...attributes }, text);
  const lines = (x, y, anchor, texts) => texts.map((text, i) => words(x, y + 15 * i, text, anchor));
  const title = (part, text) => words(part.left + part.side / 2, part.top - BOX - 2 * SPACE - 3, text);
  const classToken = part => [
    square(part, 0, { class: "tour-box" }), words(part.left + part.side / 2, part.top - SPACE - BOX / 2 + 4, "class token", "middle", { class: "tour-class" }),
  ];

  /* A scene, dimmed where it is not looked at, with frames on what is looked at and on the target's cell. */
  function scene(part, { bytes, target }, shares, lit) {
    const canvas = document.createElement("canvas"), most = Math.max(...shares.slice(1));
    Explorer.paint(canvas, bytes);
    const picture = svg("image", {
      href: canvas.toDataURL(), x: part.left, y: part.top, width: part.side, height: part.side,
      preserveAspectRatio: "none", class: "explorer-pixels",
    });
    const dimmed = shares.flatMap((share, j) => (j === 0 ? [] : [square(part, j, { class: "tour-dim", opacity: 0.6 * (1 - share / most) })]));
    return [
      picture, ...dimmed, ...classToken(part), ...lit.map(j => square(part, j, { class: "tour-lit" })),
      square(part, target + 1, { class: "tour-target-edge" }, 3), square(part, target + 1, { class: "tour-target" }, 3),
    ];
  }

  /* A map's row: the class token's share in its box, the cells' below; darkest is a share of `most`. */
  function map(part, shares, most, framed) {
    const box = shares.map((share, j) => square(part, j, { class: "tour-share", "fill-opacity": share / most }));
    const edge = svg("rect", { x: part.left, y: part.top, width: part.side, height: part.side, class: "tour-edge" });
    const [under, name] = classToken(part);
    return [under, ...box, name, edge, ...framed.map(j => square(part, j, { class: "tour-differs" }))];
  }

  /* Draw all of it anew. kind: as above. shares: the N of the chosen token's row. teacher and student: {title, bytes,
     target} of what each sees, the target's cell; the teacher's may be null, with words instead. mapTitle: the map's;
     compared: the shares of the second map, or null; weights: lines of text beside it. buttons: a function of the places
     that makes what can be pressed. */
  function draw(drawing, { kind, shares, token, teacher, nobody, mapTitle, student, compared, weights }, buttons) {
    const at = placesOf(kind), lit = shares.flatMap((share, j) => (share > 0.08 ? [j] : []));
    const differing = compared ? shares.flatMap((share, j) => (Math.abs(share - compared[j]) > DIFFERS ? [j] : [])) : [];
    const most = Math.max(...shares, ...(compared ?? []));
    const you = { x: at.teacher.side / 2, across: at.teacher.side / 2, y: TOP + SIDE / 2 };
    const source = j => (kind === "painted" ? you : place(at.teacher, j));
    const below = TOP + SIDE + 20, besides = compared && [
      ...lines(at.second.left - 8, below, "end", ["to compare: the map", "of the student's", "own scene"]),
      ...lines(at.second.left + at.second.side + 8, below, "start", [differing.length ? "red: they differ" : "the two are alike", ...weights]),
    ];
    drawing.setAttribute("viewBox", `${-MARGIN} 0 ${WIDE + 2 * MARGIN} ${at.bottom + MARGIN}`);
    drawing.replaceChildren(
      ...(teacher ? [title(at.teacher, teacher.title), ...scene(at.teacher, teacher, shares, lit)] : [
        svg("rect", { x: 0, y: TOP, width: at.teacher.side, height: SIDE, class: "tour-nobody" }),
        words(at.teacher.side / 2, TOP + SIDE / 2 + 5, nobody)]),
      title(at.map, mapTitle), ...map(at.map, shares, most, differing),
      ...(compared ? [...map(at.second, compared, most, differing), ...besides] : []),
      title(at.student, student.title), ...scene(at.student, student, shares, lit),
      square(at.student, token, { class: "tour-token" }, token === 0 ? 0 : -2),
      ...(teacher || kind === "painted" ? lit.map(j => flow(source(j), place(at.map, j), shares[j])) : []),
      ...lit.map(j => flow(place(at.map, j), place(at.student, j), shares[j])),
      ...buttons(at));
  }

  Object.assign(Explorer, { drawTour: draw, tourSquare: square });
})();
