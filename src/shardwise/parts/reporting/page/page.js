// Starts the page: decodes an operation when it is chosen, and redraws when the theme or size changes.

async function start() {
  const data = JSON.parse($("#data").textContent);
  const timeline = new Timeline(), tensor = new TensorMap();
  const choose = (i) => { timeline.choose(i); $("#timeline").scrollIntoView({ block: "start" }); };
  const maps = new HeatMaps(choose), ranks = new RankTable(choose), decoded = [];
  const redraw = () => { if (decoded.length) { maps.draw(); timeline.draw(); ranks.draw(); } tensor.draw(); };

  const show = async (at) => {
    for (const each of document.querySelectorAll("[data-operation]")) each.hidden = Number(each.dataset.operation) !== at;
    for (const body of document.querySelectorAll(".body:has(> [data-operation])")) {
      body.parentElement.hidden = !body.querySelector(":scope > :not([hidden])");
    }
    const operation = (decoded[at] ??= await decodeOperation(data.operations[at]));
    maps.show(operation);
    timeline.show(operation);
    ranks.show(operation);
    navigate();
  };
  for (const each of document.querySelectorAll(".needs-ranks")) each.hidden = !data.operations.length;
  $(".choose").hidden = data.operations.length < 2;
  $("#operation").addEventListener("change", (event) => show(Number(event.target.value)));
  setTheme(redraw);
  if (data.operations.length) await show(0);

  $("#tensors").hidden = !data.tensors.length;
  $("#tensor").replaceChildren(...data.tensors.map((each, at) => make("option", { value: at }, each.name)));
  $("#tensor").addEventListener("change", (event) => tensor.show(data.tensors[Number(event.target.value)]));
  if (data.tensors.length) await tensor.show(data.tensors[0]);
  navigate();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; requestAnimationFrame(redraw); } });
  document.documentElement.dataset.ready = "yes";
}

/** Hide the links to sections that have nothing to show. */
function navigate() {
  for (const link of document.querySelectorAll("nav a")) link.hidden = !$(link.getAttribute("href")).offsetHeight;
}

/** Follow the system's theme, until the reader presses the switch. */
function setTheme(redraw) {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.style.colorScheme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => { $("#theme").textContent = isDark() ? "Light" : "Dark"; };
  $("#theme").addEventListener("click", () => { root.style.colorScheme = isDark() ? "light" : "dark"; label(); redraw(); });
  system.addEventListener("change", () => { label(); redraw(); });
  label();
}

start().catch((error) => {
  const text = `This browser cannot draw the charts (${error.message}). The tables are complete.`;
  $("main").prepend(make("section", { class: "notice" }, text));
});
