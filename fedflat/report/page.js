
"use strict";
(() => {
  const LEFT = 46, TOP = 14, BOTTOM = 218, WIDTH = 480;
  const hidden = new Set();

  const make = (name, text, kind) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  };

  function setUp(card) {
    const info = JSON.parse(card.querySelector('script[type="application/json"]').textContent);
    const plot = card.querySelector(".plot"), tip = card.querySelector(".tip");
    const first = info.series[0].x;
    info.series.forEach((series) => { series.x = series.x || first; });
    let at = null;

    const drawing = () => [...plot.querySelectorAll("svg")].find((svg) => getComputedStyle(svg).display !== "none");
    const number = (value) => info.percent ? (100 * value).toFixed(2) + " %" : String(Number(value.toPrecision(5)));
    const shown = (axis) => info.series.filter((series) => series.x[axis] && !hidden.has(series.style));
    const stops = (axis) => [...new Set(shown(axis).flatMap((series) => series.x[axis]))].sort((a, b) => a - b);

    function closest(values, value) {
      let best = 0;
      values.forEach((each, place) => {
        if (Math.abs(each - value) < Math.abs(values[best] - value)) best = place;
      });
      return best;
    }

    function scales(svg) {
      const box = svg.dataset, x0 = +box.x0, x1 = +box.x1, log = box.log === "1" ? Math.log10 : (value) => value;
      const y0 = log(+box.y0), y1 = log(+box.y1), left = +box.left, right = +box.right;
      const xlog = box.xlog === "1" ? Math.log10 : (value) => value, power = box.xlog === "1" ? (value) => 10 ** value : (value) => value;
      return {
        x: (value) => left + (xlog(value) - xlog(x0)) / (xlog(x1) - xlog(x0)) * (right - left),
        back: (pixel) => power(xlog(x0) + (pixel - left) / (right - left) * (xlog(x1) - xlog(x0))),
        y: (value) => BOTTOM + (log(value) - y0) / (y1 - y0) * (TOP - BOTTOM),
      };
    }

    function clear() {
      at = null;
      tip.hidden = true;
      plot.querySelectorAll(".cursor, .mark").forEach((node) => node.remove());
    }

    function add(svg, name, kind, places) {
      const node = document.createElementNS(svg.namespaceURI, name);
      node.setAttribute("class", kind);
      Object.entries(places).forEach(([key, value]) => node.setAttribute(key, value));
      svg.append(node);
    }

    function row(series, place) {
      const line = make("div"), name = make("span"), dot = make("i", undefined, series.style < 0 ? "ink" : "c" + series.style % 7);
      name.append(dot, series.label);
      let text = series.y ? number(series.y[place]) : "";
      if (series.sd) text += " ± " + number(series.sd[place]);
      else if (series.low) text += (text && " ") + "[" + number(series.low[place]) + ", " + number(series.high[place]) + "]";
      line.append(name, make("span", text));
      return line;
    }

    function show(value) {
      const svg = drawing();
      if (!svg) return;
      const axis = svg.dataset.axis, scale = scales(svg), all = stops(axis);
      clear();
      if (!all.length) return;
      at = all[closest(all, value)];
      const pixel = scale.x(at), rows = [];
      add(svg, "path", "cursor", { d: `M${pixel},${TOP}V${BOTTOM}` });
      shown(axis).forEach((series) => {
        const place = closest(series.x[axis], at);
        if (Math.abs(series.x[axis][place] - at) > 1e-6 + Math.abs(scale.back(pixel + 3) - at)) return;
        rows.push([series.y ? series.y[place] : Infinity, row(series, place)]);
        if (series.y && card.id !== "f-classes" && !info.names.length && scale.y(series.y[place]) <= BOTTOM) {
          const tone = series.style < 0 ? "ink" : "c" + series.style % 7;
          add(svg, "circle", "mark " + tone, { cx: scale.x(series.x[axis][place]), cy: scale.y(series.y[place]), r: 3.2 });
        }
      });
      if (info.series.length > 3) rows.sort((a, b) => b[0] - a[0]);
      tip.replaceChildren(make("strong", info.names[at] || `${info.axes[axis]} ${Number(at.toPrecision(5))}`), ...rows.map((each) => each[1]));
      tip.hidden = false;
      const width = plot.clientWidth, x = pixel / WIDTH * width;
      tip.style.left = Math.max(0, Math.min(width - tip.offsetWidth, x > width / 2 ? x - tip.offsetWidth - 12 : x + 12)) + "px";
    }

    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect(), svg = drawing();
      if (svg) show(scales(svg).back((event.clientX - box.left) / box.width * WIDTH));
    });
    plot.addEventListener("pointerleave", clear);
    plot.addEventListener("blur", clear);
    plot.addEventListener("keydown", (event) => {
      const svg = drawing();
      if (!svg) return;
      const all = stops(svg.dataset.axis), last = all.length - 1;
      const place = at === null ? -1 : closest(all, at), step = event.shiftKey ? 10 : 1;
      const target = {
        ArrowRight: Math.min(last, place + step), ArrowLeft: place < 0 ? last : Math.max(0, place - step), Home: 0, End: last,
      }[event.key];
      if (event.key === "Escape") clear();
      if (target === undefined || last < 0) return;
      event.preventDefault();
      show(all[target]);
    });

    card.querySelector("details").addEventListener("toggle", (event) => {
      const holder = event.target.querySelector(".scroll");
      if (!holder.firstChild) holder.append(dataTable(info, first));
    });
  }

  function dataTable(info, first) {
    const table = make("table"), head = make("tr"), body = make("tbody"), rows = new Map(), top = make("thead");
    const names = [info.axes.round], byEpsilon = info.series.length === 1 && first.epsilon;
    if (byEpsilon) names.push(info.axes.epsilon);
    const start = names.length;
    const fill = (series, values, label, note) => {
      const place = names.push(label + note) - 1;
      values.forEach((value, index) => {
        const turn = series.x.round[index];
        if (!rows.has(turn)) rows.set(turn, byEpsilon ? [turn, first.epsilon[index]] : [turn]);
        rows.get(turn)[place] = value;
      });
    };
    info.series.forEach((series) => {
      if (series.y) fill(series, series.y, series.label, "");
      if (series.sd) fill(series, series.sd, series.label, " sd");
      else if (series.low) {
        fill(series, series.low, series.label, " low");
        fill(series, series.high, series.label, " high");
      }
    });
    const text = (value, place) => value === undefined ? "–"
      : info.percent && place >= start ? (100 * value).toFixed(2) : String(Number(value.toPrecision(6)));
    names.forEach((name) => { const cell = make("th", name); cell.scope = "col"; head.append(cell); });
    [...rows.keys()].sort((a, b) => a - b).forEach((turn) => {
      const line = make("tr"), values = rows.get(turn);
      names.forEach((_, place) => line.append(make("td", text(values[place], place))));
      body.append(line);
    });
    top.append(head);
    table.append(make("caption", info.title + (info.unit ? ", " + info.unit : "")), top, body);
    return table;
  }

  document.querySelectorAll("figure.card").forEach(setUp);
  document.querySelectorAll(".chips button").forEach((button) => button.addEventListener("click", () => {
    const group = +button.dataset.group, off = !hidden.delete(group);
    if (off) hidden.add(group);
    button.setAttribute("aria-pressed", String(!off));
    document.querySelectorAll(".plot .g" + group).forEach((node) => node.classList.toggle("off", off));
  }));
})();
