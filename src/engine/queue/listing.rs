//! The text of `list-tubes` and `list-tubes-watched` for more than 1,024 tubes.
//!
//! A list of 100,000 tubes takes milliseconds to make and megabytes to store. So each iteration
//! adds at most 1,024 names. All replies with the list share it: a client that does not read its reply has no
//! copy of its own. The system moves a long text by remapping its pages.

use crate::engine::headroom::{self, Headroom, NoMemory};
use std::cell::Cell;
use std::rc::Rc;

/// The bytes of a list.
#[derive(Debug)]
pub struct ListText {
    text: Vec<u8>,
    /// The bytes of all lists.
    all_bytes: Rc<Cell<u64>>,
}

impl ListText {
    /// Returns a list without names. Its bytes are counted in `all_bytes` as long as it exists.
    pub fn new(all_bytes: &Rc<Cell<u64>>) -> Result<ListText, NoMemory> {
        let all_bytes = Rc::clone(all_bytes);
        let mut list = ListText { text: Vec::new(), all_bytes };
        list.push(b"---\n")?;
        Ok(list)
    }

    /// Adds a name. After an error a part of its line may have been added.
    pub fn push_name(&mut self, name: &str) -> Result<(), NoMemory> {
        self.push(b"- ")?;
        self.push(name.as_bytes())?;
        self.push(b"\n")
    }

    pub fn bytes(&self) -> &[u8] {
        &self.text
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), NoMemory> {
        headroom::keeping(Headroom::ThreeQuarters, || self.text.try_reserve(bytes.len()))?;
        self.text.extend_from_slice(bytes);
        self.all_bytes.update(|all| all + bytes.len() as u64);
        Ok(())
    }
}

impl Drop for ListText {
    fn drop(&mut self) {
        self.all_bytes.update(|all| all - self.text.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_list_are_counted_while_it_exists() {
        let all_bytes = Rc::default();
        let mut list = ListText::new(&all_bytes).expect("no memory");
        let mut expected = String::from("---\n");
        for number in 0..4000 {
            let name = format!("tube-{number}");
            list.push_name(&name).expect("no memory");
            expected += &format!("- {name}\n");
        }
        assert_eq!(list.bytes(), expected.as_bytes());
        assert_eq!(all_bytes.get(), expected.len() as u64);
        drop(list);
        assert_eq!(all_bytes.get(), 0);
    }
}
