for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    heads.forEach((h) => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const of = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const number = head.classList.contains("n");
    const rows = [...table.tBodies[0].rows].sort((a, b) => number ? of(a) - of(b) : of(b).localeCompare(of(a)));
    table.tBodies[0].append(...(down ? rows.reverse() : rows));
  }));
}
