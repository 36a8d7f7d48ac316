// Colours of the style for canvases, and the hint beside the pointer.

const $ = (selector) => document.querySelector(selector);

/** Return an element. Texts are never parsed as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Return a colour of the style in the present theme, as [red, green, blue]. */
function colour(name) {
  const probe = make("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return found;
}

const css = ([red, green, blue], alpha = 1) => `rgb(${red | 0} ${green | 0} ${blue | 0} / ${alpha})`;

/** Return 65 colours from usual to slow. */
function heatColours() {
  const stops = [0, 1, 2, 3, 4].map((k) => colour(`heat${k}`));
  return Array.from({ length: 65 }, (_, k) => {
    const at = (k / 64) * 4, low = Math.min(3, Math.floor(at));
    return css(stops[low].map((value, c) => value + (stops[low + 1][c] - value) * (at - low)));
  });
}

/** Show the hint at a point of the window; `rows` are pairs of texts. */
function showHint(x, y, title, rows, here = -1) {
  const hint = $("#hint");
  const lines = rows.map(([name, value], k) => make("tr", k === here ? { class: "here" } : {}, make("td", {}, name), make("td", {}, value)));
  hint.replaceChildren(make("b", {}, title), make("table", {}, make("tbody", {}, ...lines)));
  hint.hidden = false;
  const { width, height } = hint.getBoundingClientRect();
  hint.style.left = `${Math.max(8, Math.min(x + 16, innerWidth - width - 8))}px`;
  hint.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18}px`;
}

const hideHint = () => { $("#hint").hidden = true; };
const speak = (text) => { $("#spoken").textContent = text; };

/** Return what a rank did in a stage, as a text. */
function stageText(stage, i) {
  if (!(stage.start[i] >= 0)) return "not run";
  const parts = [formatSeconds(stage.own[i])];
  if (stage.waited[i] > 0.001) parts.push(`waited ${formatSeconds(stage.waited[i])}`);
  if (stage.bytes[i] > 0) parts.push(`${formatBytes(stage.bytes[i])} at ${formatBytes(stage.bytes[i] / stage.own[i])}/s`);
  if (stage.retries[i] > 0) parts.push(`${formatCount(stage.retries[i])} retries`);
  return parts.join(", ");
}

function showRank(operation, i, x, y, here = -1) {
  const rows = operation.present[i] ? operation.stages.map((stage) => [stage.name, stageText(stage, i)]) : [["", "sent no telemetry"]];
  showHint(x, y, rankName(operation, i), rows, here);
}

/** Size a canvas for the screen; return its context, in CSS pixels. */
function prepare(canvas, width, height) {
  const dots = devicePixelRatio || 1;
  canvas.width = Math.round(width * dots);
  canvas.height = Math.round(height * dots);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(dots, dots);
  return context;
}
