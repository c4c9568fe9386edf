// Markdown as elements. All text of a model becomes text nodes, links lead to http and https alone, and no markup is read.
// Quantifiers are bounded, or their characters exclude what ends them: no text takes long.
"use strict";

const MAX_DEPTH = 8; // of blocks and of emphasis in one another; deeper ones are text
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]{0,12})([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const INLINE = new RegExp([
  /\\(?<escaped>[\\`*_{}[\]()#+.!|~>-])/,
  /``(?<code2>[^\n]{1,500}?)``|`(?<code>[^`\n]+)`/,
  /\*\*(?=\S)(?<strong>[^]{1,1000}?)(?<=\S)\*\*(?!\*)/,
  /\*(?=[^\s*])(?<em>[^*]{0,999}[^\s*])\*|(?<!\w)_(?=[^\s_])(?<em2>[^_]{0,999}[^\s_])_(?!\w)/,
  /~~(?=\S)(?<del>[^~]{1,999})~~/,
  /\[(?<label>[^[\]\n]{1,500})\]\((?<href>(?:[^\s()]|\([^\s()]{0,500}\)){1,2000})(?:[ \t]+"[^"\n]{0,500}")?\)/,
  /(?<![\w/])(?<bare>https?:\/\/[^\s<>"'`*]{1,2000})/,
].map((part) => part.source).join("|"), "g");

function element(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}

/** Show a text that grows: only blocks that changed are replaced, so that selected text stays selected. */
function showMarkdown(pane, text) {
  const sources = blocksOf(text);
  const shown = pane.sources || [];
  let start = 0;
  while (start < shown.length && shown[start] === sources[start]) start += 1;
  while (pane.children.length > start) pane.lastElementChild.remove();
  pane.append(...sources.slice(start).map((source) => blockNode(source, 0)));
  pane.sources = sources;
}

/** Return the sources of a text's blocks. */
function blocksOf(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  for (let start = 0, end; start < lines.length; start = end) {
    end = endOfBlock(lines, start);
    if (lines[start].trim()) blocks.push(lines.slice(start, end).join("\n").trimEnd());
  }
  return blocks;
}

function endOfBlock(lines, start) {
  const line = lines[start];
  const upTo = (isOver) => {
    let end = start + 1;
    while (end < lines.length && !isOver(lines[end], end)) end += 1;
    return end;
  };
  const fence = FENCE.exec(line)?.[1];
  if (fence) return Math.min(upTo((one) => one.trim().startsWith(fence) && !one.trim().replaceAll(fence[0], "")) + 1, lines.length);
  if (!line.trim() || HEADING.test(line) || RULE.test(line)) return start + 1;
  if (QUOTE.test(line)) return upTo((one) => !QUOTE.test(one));
  if (ITEM.test(line)) return upTo((one, index) => isPastList(one, lines[index - 1]));
  if (isTable(lines, start)) return upTo((one) => !one.includes("|"));
  return upTo((one, index) => !one.trim() || [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(one)) || isTable(lines, index));
}

function isPastList(line, before) {
  if (!line.trim() || ITEM.test(line) || /^(  |\t)/.test(line)) return RULE.test(line);
  return !before.trim() || [FENCE, HEADING, QUOTE].some((kind) => kind.test(line));
}

const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function isTable(lines, start) {
  const next = lines[start + 1] || "";
  return lines[start].includes("|") && next.includes("-") && cellsOf(next).every((cell) => /^:?-+:?$/.test(cell))
    && cellsOf(next).length === cellsOf(lines[start]).length;
}

function blockNode(source, depth) {
  const lines = source.split("\n");
  const heading = HEADING.exec(source);
  if (FENCE.test(source)) return codeNode(lines);
  if (depth < MAX_DEPTH) {
    const nested = (text) => blocksOf(text).map((one) => blockNode(one, depth + 1));
    if (heading) return element(`h${Math.min(heading[1].length + 2, 6)}`, ...inlineNodes(source.slice(heading[0].length).replace(/ #+ *$/, "")));
    if (RULE.test(source)) return element("hr");
    if (QUOTE.test(source)) return element("blockquote", ...nested(lines.map((line) => line.replace(QUOTE, "")).join("\n")));
    if (ITEM.test(source)) return listNode(lines, nested);
    if (isTable(lines, 0)) return tableNode(lines);
  }
  return element("p", ...inlineNodes(source));
}

function codeNode(lines) {
  const isClosed = lines.length > 1 && FENCE.test(lines.at(-1));
  return element("pre", element("code", lines.slice(1, isClosed ? -1 : undefined).join("\n")));
}

function listNode(lines, nested) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const list = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) list.start = parseInt(mark, 10);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length) items.push([line.slice(found[0].length)]);
    else items.at(-1).push(line);
  }
  for (const [first, ...rest] of items) {
    const least = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)), indent.length + 4);
    const nodes = nested([first, ...rest.map((line) => line.slice(Math.min(least, line.search(/\S|$/))))].join("\n"));
    const isTight = nodes[0]?.tagName === "P" && nodes.slice(1).every((node) => /^[UO]L$/.test(node.tagName));
    list.append(element("li", ...(isTight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes)));
  }
  return list;
}

function tableNode([head, , ...rows]) {
  const row = (tag, line) => element("tr", ...cellsOf(line).map((cell) => element(tag, ...inlineNodes(cell))));
  const table = element("table", element("thead", row("th", head)), element("tbody", ...rows.map((line) => row("td", line))));
  const pane = element("div", table);
  pane.className = "table";
  return pane;
}

function inlineNodes(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index), ...inlineNode(match, depth + 1));
    end = match.index + match[0].length;
  }
  return [...nodes, text.slice(end)].filter((node) => node !== "");
}

function inlineNode(match, depth) {
  const { escaped, code, code2, strong, em, em2, del, label, href, bare } = match.groups;
  if (escaped) return [escaped];
  if (code || code2) return [element("code", code || code2.trim())];
  if (strong) return [element("strong", ...inlineNodes(strong, depth))];
  if (em || em2) return [element("em", ...inlineNodes(em || em2, depth))];
  if (del) return [element("del", ...inlineNodes(del, depth))];
  if (label) return linkNodes(href, inlineNodes(label, depth)) || [match[0]];
  const address = bare.replace(/[.,;:!?)\]]{1,9}$/, "");
  return [...(linkNodes(address, [address]) || [address]), bare.slice(address.length)];
}

/** Return a link, or null for an address that does not lead to http or https. */
function linkNodes(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  const link = element("a", ...children);
  Object.assign(link, { href: url.href, title: url.href, rel: "noopener noreferrer", target: "_blank" });
  return [link];
}
