"use strict";
// Puts bokeh's pictures in their places, paints them with the style sheet's colors, and zooms them
// from the keyboard. A model's tags say which property has which of the colors.

const plots = new Map();
const dark = matchMedia("(prefers-color-scheme: dark)");
const still = matchMedia("(pointer: coarse)");

function paint(plot) {
  const colors = getComputedStyle(document.documentElement);
  for (const model of plot.document._all_models.values()) {
    for (const roles of model.tags ?? []) {
      for (const [property, role] of Object.entries(roles)) {
        const color = colors.getPropertyValue("--" + role).trim();
        const old = model[property];
        model[property] = old !== null && typeof old === "object" ? { value: color } : color;
      }
    }
  }
}

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function show(picture, id) {
  const [view] = await Bokeh.embed.embed_item(picture, id);
  const plot = view.model;
  plots.set(id, { view, plot, start: plot.x_range.start, end: plot.x_range.end });
  // a finger scrolls the page; zooming has its buttons
  if (still.matches) plot.toolbar.active_drag = null;
  if (still.matches) for (const tool of plot.toolbar.tools) if ("dimensions" in tool) tool.active = false;
  paint(plot);
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

const actions = {
  in: (id) => shift(id, 0.5, 0), out: (id) => shift(id, 2, 0), all: (id) => shift(id, Infinity, 0),
  left: (id) => shift(id, 1, -0.4), right: (id) => shift(id, 1, 0.4),
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (!button) return;
  const figure = button.closest(".figure");
  for (const picture of figure.querySelectorAll(".picture")) {
    if (!picture.closest("[hidden]")) actions[button.dataset.action](picture.id);
  }
});

document.addEventListener("change", (event) => {
  const figure = event.target.closest(".figure");
  if (event.target.type !== "radio" || !figure) return;
  for (const part of figure.querySelectorAll("[data-choice]")) {
    part.hidden = part.dataset.choice !== event.target.value;
  }
});

const repaint = () => plots.forEach(({ plot }) => paint(plot));
dark.addEventListener("change", repaint);

// paper is white, and of another width: prints get pictures of the pictures
addEventListener("beforeprint", () => {
  document.documentElement.dataset.printing = "";
  repaint();
  plots.forEach(({ view }, id) => {
    // what is drawn from data learns of its new color at leisure, unless it is told to look
    for (const part of view.renderer_views.values()) part.update_data?.();
    document.getElementById(id).append(view.export("png").canvas);
  });
});
addEventListener("afterprint", () => {
  delete document.documentElement.dataset.printing;
  repaint();
  document.querySelectorAll(".picture > canvas").forEach((canvas) => canvas.remove());
});

async function start() {
  const library = document.createElement("script");
  library.textContent = await unpacked("library");
  document.head.append(library);
  Bokeh.logger.set_level("error");
  for (const [id, picture] of Object.entries(JSON.parse(await unpacked("pictures")))) {
    await show(picture, id);
    // the page answers between two pictures
    await new Promise((resolve) => setTimeout(resolve));
  }
  document.documentElement.dataset.drawn = plots.size;
}

start().catch((error) => {
  console.error(error);
  for (const place of document.querySelectorAll(".picture:empty")) {
    place.textContent = "This browser cannot draw the picture; the table has its numbers.";
  }
});
