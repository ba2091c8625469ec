"use strict";
for (const heading of document.querySelectorAll("thead th")) {
  heading.querySelector("button").addEventListener("click", () => {
    const headings = [...heading.parentNode.children];
    const column = headings.indexOf(heading);
    const up = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of headings) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = heading.closest("table").tBodies[0];
    const value = (row) => row.children[column].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      const order = column ? x - y : x.localeCompare(y);
      return up ? order : -order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}
