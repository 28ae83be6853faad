"use strict";
// Shows one model at a time, embeds bokeh's charts of it, colors them by the style sheet, and zooms
// them from the keyboard. The tags of a bokeh model name the role of each of its colors.

const plots = new Map();
const sections = [...document.querySelectorAll("main > section")];
const touch = matchMedia("(pointer: coarse)");

function paint({ plot, id }) {
  const place = document.getElementById(id);
  for (const model of plot.document._all_models.values()) {
    for (const [property, role] of (model.tags ?? []).flatMap(Object.entries)) {
      // read from a typed property: the text of --card is light-dark(...), not a color
      place.style.color = `var(--${role})`;
      const { color } = getComputedStyle(place);
      // a glyph's color is a column or, as here, a value
      model[property] = model[property] instanceof Object ? { value: color } : color;
    }
  }
  place.style.color = "";
}

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function show(picture, id) {
  const [view] = await Bokeh.embed.embed_item(picture, id);
  const plot = view.model;
  plots.set(id, { id, view, plot, start: plot.x_range.start, end: plot.x_range.end });
  // a finger scrolls the page; zooming has its buttons
  if (touch.matches) {
    plot.toolbar.active_drag = null;
    for (const tool of plot.toolbar.tools) if ("dimensions" in tool) tool.active = false;
  }
  paint(plots.get(id));
}

// shows `factor` of what is shown, moved by a part of it, within the whole chart
function shift(id, factor, part) {
  const { plot, start, end } = plots.get(id);
  const { start: left, end: right } = plot.x_range;
  const width = Math.min((right - left) * factor, end - start);
  const middle = (left + right) / 2 + part * width;
  const first = Math.min(Math.max(middle - width / 2, start), end - width);
  plot.x_range.setv({ start: first, end: first + width });
}

const ACTIONS = { in: [0.5, 0], out: [2, 0], all: [Infinity, 0], left: [1, -0.4], right: [1, 0.4] };

document.addEventListener("click", ({ target }) => {
  const button = target.closest("button[data-action]");
  for (const picture of button?.closest(".figure").querySelectorAll(".picture") ?? []) {
    if (!picture.closest("[hidden]")) shift(picture.id, ...ACTIONS[button.dataset.action]);
  }
});

document.addEventListener("change", ({ target }) => {
  for (const part of target.closest(".figure").querySelectorAll("[data-choice]")) {
    part.hidden = part.dataset.choice !== target.value;
  }
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(paint));

// paper is white, and of another width: prints get pictures of the pictures
addEventListener("beforeprint", () => {
  document.documentElement.dataset.printing = "";
  for (const shown of plots.values()) {
    paint(shown);
    // glyphs would take their new colors only later
    for (const part of shown.view.renderer_views.values()) part.update_data?.();
    document.getElementById(shown.id).append(shown.view.export("png").canvas);
  }
});
addEventListener("afterprint", () => {
  delete document.documentElement.dataset.printing;
  plots.forEach(paint);
  document.querySelectorAll(".picture > canvas").forEach((canvas) => canvas.remove());
});

// a finger that taps a chart is told what a pointer above it is
document.addEventListener("click", (event) => {
  const { clientX, clientY, pointerType } = event;
  if (pointerType !== "touch" || !event.target.closest(".picture")) return;
  const [place] = event.composedPath();
  // without a view the event has no place on a page that is scrolled
  const at = { view: window, clientX, clientY, bubbles: true, composed: true, isPrimary: true };
  for (const name of ["pointerover", "pointermove"]) place.dispatchEvent(new PointerEvent(name, at));
});

async function pictures() {
  const library = document.createElement("script");
  library.textContent = await unpacked("library");
  document.head.append(library);
  Bokeh.logger.set_level("error");
  return Object.entries(JSON.parse(await unpacked("pictures")));
}

async function draw(section) {
  for (const [id, picture] of await packed) {
    if (plots.has(id) || !section.contains(document.getElementById(id))) continue;
    await show(picture, id);
    // the page answers between two pictures
    await new Promise((resolve) => setTimeout(resolve));
  }
  document.documentElement.dataset.drawn = plots.size;
}

// shows the model that the address names; one that names none leaves the model that is shown
function choose() {
  const target = document.getElementById(location.hash.slice(1));
  const chosen = target?.closest("main > section") ?? sections.find((part) => !part.hidden);
  for (const section of sections) section.hidden = section !== chosen;
  for (const link of document.querySelectorAll("nav.models a")) {
    const leads = chosen.contains(document.getElementById(link.hash.slice(1)));
    link.ariaCurrent = leads ? "true" : null;
  }
  target?.scrollIntoView();
  drawing = drawing.then(() => draw(chosen)).catch((error) => {
    console.error(error);
    for (const place of chosen.querySelectorAll(".picture:empty")) {
      place.textContent = "This browser cannot draw the picture; the table has its numbers.";
    }
  });
}

const packed = pictures();
let drawing = Promise.resolve();
if (sections.length) {
  choose();
  addEventListener("hashchange", choose);
}
