//! Owns what becomes of a finished run: the document, its comparison with others, conditions on it, the page. Everything
//! here works from documents alone, so that a page can be drawn long after the run. Never measures.

pub mod chart;
pub mod compare;
pub mod condition;
pub mod document;
pub mod model;
pub mod page;
mod sections;
