"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("script");
  const data = JSON.parse(document.getElementById("data").textContent);
  const live = document.getElementById("live");

  // As in the tables: four digits, and an exponent where there would be more zeros than digits.
  const short = (value) => {
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const size = Math.abs(value);
    if (size >= 1e-4 && size < 1e6) return size < 1e4 ? String(Number(value.toPrecision(4))) : value.toFixed(0);
    return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  };

  /* The cursor of the charts is one: all of them show the same step. */
  const charts = data.charts.map((chart) => {
    const figure = document.querySelector(`[data-chart="${chart.name}"]`);
    const area = figure.querySelector(".area");
    return {
      ...chart,
      area,
      cursor: figure.querySelector(".cursor"),
      at: figure.querySelector(".at"),
      values: [...figure.querySelectorAll(".value")],
      names: [...figure.querySelectorAll(".legend .name")].map((name) => name.textContent),
      left: Number(area.dataset.left),
      right: Number(area.dataset.right),
      steps: [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b),
    };
  });

  // Index of the entry of a rising list that is nearest to a number.
  const nearest = (list, wanted) => {
    let low = 0;
    let high = list.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    return low > 0 && wanted - list[low - 1] <= list[low] - wanted ? low - 1 : low;
  };

  // A line's value at a step; none where its next point is further than the chart's own points are apart.
  const valueAt = (chart, line, step) => {
    const i = nearest(line.x, step);
    const slack = (chart.right - chart.left) / Math.max(1, chart.steps.length - 1);
    return Math.abs(line.x[i] - step) <= slack ? line.y[i] : null;
  };

  const show = (chart, step) => {
    const share = (step - chart.left) / (chart.right - chart.left);
    const inside = share >= 0 && share <= 1;
    chart.cursor.hidden = !inside;
    if (!inside) return;
    chart.cursor.style.left = `${100 * share}%`;
    chart.at.textContent = step;
    chart.area.setAttribute("aria-valuenow", step);
    chart.area.setAttribute("aria-valuetext", `step ${step}`);
    chart.lines.forEach((line, i) => {
      const value = valueAt(chart, line, step);
      chart.values[i].textContent = value === null ? "–" : short(value);
    });
  };

  let current = null;
  const move = (step) => {
    current = step;
    charts.forEach((chart) => show(chart, step));
  };
  const leave = () => {
    current = null;
    for (const chart of charts) {
      chart.cursor.hidden = true;
      for (const shown of [chart.at, ...chart.values]) shown.textContent = shown.dataset.last;
    }
  };
  const say = (chart) => {
    const parts = chart.names.map((name, i) => `${name} ${chart.values[i].textContent}`);
    live.textContent = `Step ${current}: ${parts.join(", ")}`;
  };

  const KEYS = {
    ArrowLeft: (i) => i - 1, ArrowDown: (i) => i - 1, ArrowRight: (i) => i + 1, ArrowUp: (i) => i + 1,
    PageUp: (i, n) => i + Math.max(1, Math.round(n / 10)), PageDown: (i, n) => i - Math.max(1, Math.round(n / 10)),
    Home: () => 0, End: (i, n) => n - 1,
  };
  for (const chart of charts) {
    const pointed = (event) => {
      const box = chart.area.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      move(chart.steps[nearest(chart.steps, chart.left + share * (chart.right - chart.left))]);
    };
    chart.area.addEventListener("pointermove", pointed);
    chart.area.addEventListener("pointerdown", pointed);
    chart.area.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
    chart.area.addEventListener("blur", leave);
    chart.area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        leave();
      } else if (event.key in KEYS && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        const last = chart.steps.length - 1;
        const next = current === null && event.key.startsWith("Arrow")
          ? (event.key === "ArrowRight" || event.key === "ArrowUp" ? 0 : last)
          : KEYS[event.key](current === null ? last : nearest(chart.steps, current), chart.steps.length);
        move(chart.steps[Math.min(last, Math.max(0, next))]);
        say(chart);
      }
    });
  }

  /* The slider shows one grid beside the first. */
  const slider = document.getElementById("grid");
  const figures = [...document.querySelectorAll("#grids .grid")];
  if (slider) {
    const pick = () => {
      const index = Number(slider.value);
      const step = data.grids[index].step;
      figures.forEach((figure, i) => figure.classList.toggle("shown", i === index));
      document.getElementById("grid-step").textContent = step;
      slider.setAttribute("aria-valuetext", `step ${step}`);
    };
    slider.addEventListener("input", pick);
    pick();
  }

  /* Each prompt's last column over the steps, cut out of the grids. */
  const strips = document.getElementById("strips");
  const whole = data.grids.map((grid, i) => ({ ...grid, image: figures[i].querySelector("img") })).filter((g) => g.cell);
  const picture = (grid, row, prompt) => {
    const column = grid.columns.length - 1;
    const reward = grid.rewards[row][column];
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = grid.cell;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${prompt}, ${grid.columns[column]} at step ${grid.step}`);
    const [x, y] = [grid.origin[0] + column * grid.pitch[0], grid.origin[1] + row * grid.pitch[1]];
    const paint = () => canvas.getContext("2d").drawImage(grid.image, x, y, ...grid.cell, 0, 0, ...grid.cell);
    grid.image.decode().then(paint, () => {});
    const item = document.createElement("li");
    item.append(canvas, `step ${grid.step}`, document.createElement("br"), reward === null ? "" : short(reward));
    return item;
  };
  const most = 11;
  const spread = whole.length <= most
    ? whole
    : Array.from({ length: most }, (_, i) => whole[Math.round((i * (whole.length - 1)) / (most - 1))]);
  if (strips && whole.length > 1) {
    const title = document.createElement("h3");
    title.textContent = "The same prompt and noise over the steps";
    strips.append(title);
    whole[0].prompts.forEach((prompt, row) => {
      const strip = document.createElement("div");
      const name = document.createElement("h4");
      const list = document.createElement("ol");
      strip.className = "strip";
      name.textContent = prompt;
      list.tabIndex = 0;
      list.setAttribute("aria-label", prompt);
      list.append(...spread.filter((grid) => grid.prompts[row] === prompt).map((grid) => picture(grid, row, prompt)));
      strip.append(name, list);
      strips.append(strip);
    });
  }

  /* The theme is the system's until the button is pressed, and again when the page is loaded anew. */
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const mark = () => button.setAttribute("aria-pressed", dark());
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    mark();
  });
  system.addEventListener("change", mark);
  mark();
})();
